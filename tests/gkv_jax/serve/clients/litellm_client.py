"""LiteLLM, with the server as a provider of OpenAI's kind.

python litellm_client.py BASE_URL MODEL
"""

import asyncio
import os
import sys
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it fetches a list of prices

import litellm
from pydantic import BaseModel, Field

base_url, model = sys.argv[1:]
litellm.telemetry = False
server = {"model": f"openai/{model}", "api_base": base_url, "api_key": "none", "num_retries": 0}
hello = [{"role": "user", "content": "hi"}]


class Item(BaseModel, extra="forbid"):
    name: Literal["tea", "milk"]
    amount: int = Field(ge=1, le=9)


class Order(BaseModel, extra="forbid"):
    items: list[Item] = Field(min_length=1, max_length=3)
    delivery: Literal["post", "courier"]


answer = litellm.completion(messages=hello, max_tokens=20, temperature=0, **server)
text = answer.choices[0].message.content
assert text
assert answer.usage.completion_tokens > 0
stream = litellm.completion(
    messages=hello,
    max_tokens=20,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
    **server,
)
chunks = list(stream)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
rebuilt = litellm.stream_chunk_builder(chunks, messages=hello)
assert rebuilt.choices[0].message.content == text
assert rebuilt.usage.completion_tokens == answer.usage.completion_tokens
print("completion, stream")

# A Pydantic model, whole and streamed.
answer = litellm.completion(messages=hello, response_format=Order, **server)
print("response_format:", Order.model_validate_json(answer.choices[0].message.content))
chunks = litellm.completion(messages=hello, response_format=Order, stream=True, **server)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
assert Order.model_validate_json(text)
print("streamed response_format")

# Tools: a call, its result, and the answer to that; then a streamed call.
parameters = Order.model_json_schema()
tools = [{"type": "function", "function": {"name": "order", "parameters": parameters}}]
answer = litellm.completion(
    messages=hello, tools=tools, tool_choice="required", parallel_tool_calls=False, **server
)
message = answer.choices[0].message
assert answer.choices[0].finish_reason == "tool_calls"
assert all(Order.model_validate_json(call.function.arguments) for call in message.tool_calls)
results = [
    {"role": "tool", "tool_call_id": call.id, "name": "order", "content": "done"}
    for call in message.tool_calls
]
answer = litellm.completion(
    messages=[*hello, message, *results], tools=tools, tool_choice="none", max_tokens=5, **server
)
assert not answer.choices[0].message.tool_calls
# An answer goes back as the client has it, too.
litellm.completion(
    messages=[*hello, answer.choices[0].message.model_dump(), *hello], max_tokens=5, **server
)
named = {"type": "function", "function": {"name": "order"}}
chunks = litellm.completion(messages=hello, tools=tools, tool_choice=named, stream=True, **server)
rebuilt = litellm.stream_chunk_builder(list(chunks), messages=hello)
calls = rebuilt.choices[0].message.tool_calls
assert all(Order.model_validate_json(call.function.arguments) for call in calls)
print("tools, streamed tools")

# Other routes.
written = litellm.text_completion(
    prompt="once", max_tokens=5, **(server | {"model": f"text-completion-openai/{model}"})
)
assert written.choices[0].finish_reason in ("stop", "length")
answer = litellm.responses(input="hi", max_output_tokens=5, **server)
assert answer.output[0].content[0].text is not None
several = litellm.completion(
    messages=hello, n=2, logprobs=True, top_logprobs=2, max_tokens=5, seed=1, stop=["x"], **server
)
assert len(several.choices) == 2
print("text_completion, responses, n")


async def side_by_side() -> None:
    answers = await asyncio.gather(
        *(litellm.acompletion(messages=hello, response_format=Item, **server) for _ in range(3))
    )
    assert all(Item.model_validate_json(a.choices[0].message.content) for a in answers)


asyncio.run(side_by_side())
print("acompletion")

try:
    litellm.completion(messages=hello, extra_body={"structured_outputs": {"regex": "("}}, **server)
except litellm.BadRequestError as error:
    message = str(error)
else:
    raise AssertionError("this is no regular expression")
assert "structured_outputs.regex" in message, message
print("error:", message)
