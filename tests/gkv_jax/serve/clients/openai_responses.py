"""OpenAI's client: the Responses API.

python openai_responses.py BASE_URL MODEL
"""

import sys
from typing import Annotated, Literal

import openai
from pydantic import BaseModel, Field

base_url, model = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)

# Texts.
whole = client.responses.create(
    model=model, instructions="Be brief.", input="hi", max_output_tokens=20, temperature=0
)
assert whole.output_text
assert whole.status in ("completed", "incomplete"), whole.status
assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
with client.responses.stream(
    model=model, instructions="Be brief.", input="hi", max_output_tokens=20, temperature=0
) as stream:
    events = list(stream)
text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
assert text == whole.output_text
assert events[0].type == "response.created"
assert [event.sequence_number for event in events] == list(range(len(events)))
print("create, stream")

again = client.responses.create(
    model=model,
    input=[{"role": "user", "content": "hi"}, *whole.output, {"role": "user", "content": "and?"}],
    max_output_tokens=5,
)
assert again.usage.input_tokens > whole.usage.output_tokens
print("a second turn")


# Pydantic models.
class Step(BaseModel):
    number: int = Field(ge=1, le=9)
    kind: Literal["add", "multiply"]


class Solution(BaseModel):
    steps: list[Step] = Field(min_length=1, max_length=3)
    answer: Annotated[str, Field(max_length=8)]


parsed = client.responses.parse(model=model, input="2 + 2?", text_format=Solution)
assert isinstance(parsed.output_parsed, Solution)
print("parse:", parsed.output_parsed)
with client.responses.stream(model=model, input="2 + 2?", text_format=Solution) as stream:
    for _ in stream:
        pass
    final = stream.get_final_response()
assert isinstance(final.output_parsed, Solution)
print("streamed parse:", final.output_parsed)

# Tools: a call, its result, and the answer to that.
tools = [openai.pydantic_function_tool(Step)]
asked = client.responses.parse(
    model=model, input="hi", tools=tools, tool_choice="required", parallel_tool_calls=False
)
calls = [item for item in asked.output if item.type == "function_call"]
assert calls
assert all(isinstance(call.parsed_arguments, Step) for call in calls)
results = [
    {"type": "function_call_output", "call_id": call.call_id, "output": "4"} for call in calls
]
answered = client.responses.parse(
    model=model,
    input=[{"role": "user", "content": "hi"}, *asked.output, *results],
    tools=tools,
    tool_choice="none",
    max_output_tokens=5,
)
assert answered.output_text is not None
print("tools:", len(calls))

with client.responses.stream(
    model=model, input="hi", tools=tools, tool_choice={"type": "function", "name": "Step"}
) as stream:
    kinds = {event.type for event in stream}
    final = stream.get_final_response()
assert isinstance(final.output[0].parsed_arguments, Step)
assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
print("streamed tools")

try:
    client.responses.create(model=model, input="hi", previous_response_id="resp_1")
except openai.BadRequestError as error:
    print("error:", error.body["message"])
else:
    raise AssertionError("nothing is stored")
