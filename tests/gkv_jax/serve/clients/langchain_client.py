"""LangChain: ``ChatOpenAI`` and ``OpenAI``.

python langchain_client.py BASE_URL MODEL
"""

import asyncio
import os
import sys
from typing import Literal

os.environ["LANGSMITH_TRACING"] = "false"

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

base_url, model = sys.argv[1:]
server = {"base_url": base_url, "api_key": "none", "model": model, "max_retries": 0, "timeout": 60}
chat = ChatOpenAI(**server)


class Line(BaseModel, extra="forbid"):
    """A line of an order."""

    article: Literal["tea", "milk"]
    amount: int = Field(ge=1, le=9)


class Order(BaseModel, extra="forbid"):
    """What somebody orders."""

    lines: list[Line] = Field(min_length=1, max_length=2)
    express: bool


# Messages, whole and streamed.
short = ChatOpenAI(**server, max_tokens=20, temperature=0, seed=1)
answer = short.invoke([("system", "Be brief."), ("human", "hi")])
assert answer.content
assert answer.usage_metadata["output_tokens"] > 0
chunks = list(short.stream([("system", "Be brief."), ("human", "hi")], stream_usage=True))
whole = sum(chunks[1:], chunks[0])
assert whole.content == answer.content
assert whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]
print("invoke, stream:", whole.usage_metadata)
short.invoke([HumanMessage("hi"), answer, HumanMessage("and?")])
asyncio.run(short.ainvoke("hi"))
print("a second turn, ainvoke")

# Structured output, by each method.
for method in ("json_schema", "function_calling"):
    found = chat.with_structured_output(Order, method=method).invoke("tea, please")
    assert isinstance(found, Order), found
    print(method, found)
found = chat.with_structured_output(Order, method="json_schema", include_raw=True).invoke("tea")
assert isinstance(found["parsed"], Order), found
parts = list(chat.with_structured_output(Order, method="json_schema").stream("tea"))
assert isinstance(parts[-1], Order), parts
print("streamed", parts[-1])


class Note(BaseModel):
    text: str = "nothing"


# Any object may come in JSON mode: `}` as soon as it is legal makes it `{}`.
tokens = openai.OpenAI(base_url=base_url.removesuffix("/v1"), api_key="none").post(
    "/tokenize", body={"prompt": "}", "add_special_tokens": False}, cast_to=object
)["tokens"]
brief = ChatOpenAI(**server, logit_bias={str(token): 100 for token in tokens})
assert brief.with_structured_output(Note, method="json_mode").invoke("as JSON") == Note()
print("json_mode")


# Tools: a call, its result, and the answer to that; then a streamed call.
@tool
def add(a: Literal[1, 2], b: Literal[3, 4]) -> int:
    """The sum of two numbers."""
    return a + b


agent = chat.bind_tools([add], tool_choice="required", parallel_tool_calls=False, strict=True)
asked = agent.invoke("1 + 3?")
(call,) = asked.tool_calls
result = add.invoke(call)
assert isinstance(result, ToolMessage)
turns = [HumanMessage("1 + 3?"), asked, result]
answer = short.bind_tools([add], tool_choice="none").invoke(turns)
assert not answer.tool_calls
short.invoke([*turns, answer, HumanMessage("thanks")])
chunks = list(chat.bind_tools([add], tool_choice="add", strict=True).stream("1 + 3?"))
whole = sum(chunks[1:], chunks[0])
assert whole.tool_calls
assert all(add.invoke(call["args"]) > 3 for call in whole.tool_calls)
print("tools, streamed tools:", whole.tool_calls[0]["args"])

# Other routes.
written = OpenAI(**server, max_tokens=5)
assert written.invoke("once") is not None
assert "".join(written.stream("once")) is not None
responses = ChatOpenAI(**server, use_responses_api=True)
found = responses.with_structured_output(Order, method="json_schema").invoke("tea")
assert isinstance(found, Order), found
agent = responses.bind_tools([add], tool_choice="required", parallel_tool_calls=False, strict=True)
asked = agent.invoke("1 + 3?")
results = [add.invoke(call) for call in asked.tool_calls]
brief = ChatOpenAI(**server, use_responses_api=True, max_tokens=5)
brief.bind_tools([add], tool_choice="none").invoke([HumanMessage("1 + 3?"), asked, *results])
chunks = list(brief.stream("hi"))
whole = sum(chunks[1:], chunks[0])
assert whole.usage_metadata["output_tokens"] > 0
print("completions, responses")
