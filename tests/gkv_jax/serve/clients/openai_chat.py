"""OpenAI's client: chat completions, tools, completions, and how errors arrive.

python openai_chat.py BASE_URL MODEL
"""

import enum
import sys
from typing import Annotated, Literal

import openai
from pydantic import BaseModel, Field

base_url, model = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
hello = [{"role": "user", "content": "hi"}]

# Answers, whole and streamed.
whole = client.chat.completions.create(model=model, messages=hello, max_tokens=20, seed=1)
assert whole.choices[0].finish_reason in ("stop", "length"), whole
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
with client.chat.completions.create(
    model=model,
    messages=hello,
    max_tokens=20,
    seed=1,
    stream=True,
    stream_options={"include_usage": True},
) as stream:
    chunks = list(stream)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == whole.choices[0].message.content
assert chunks[-1].usage == whole.usage
print("chat")

# Several answers, and how likely their tokens were.
several = client.chat.completions.create(
    model=model, messages=hello, max_tokens=5, n=2, logprobs=True, top_logprobs=3
)
assert [choice.index for choice in several.choices] == [0, 1]
for choice in several.choices:
    assert all(token.logprob <= 0 for token in choice.logprobs.content)
    assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)
print("n, logprobs")


# Pydantic models.
class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Wheel(BaseModel):
    inches: int = Field(ge=10, le=30)
    spare: bool


class Car(BaseModel):
    name: Annotated[str, Field(max_length=8)]
    colour: Colour
    wheels: list[Wheel] = Field(min_length=1, max_length=3)
    owner: Annotated[str, Field(max_length=8)] | None


parsed = client.chat.completions.parse(model=model, messages=hello, response_format=Car)
assert isinstance(parsed.choices[0].message.parsed, Car)
print("parse:", parsed.choices[0].message.parsed)

with client.chat.completions.stream(model=model, messages=hello, response_format=Car) as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_completion()
assert isinstance(final.choices[0].message.parsed, Car)
assert {"chunk", "content.delta", "content.done"} <= set(kinds), kinds
print("stream:", final.choices[0].message.parsed)


# Tools: a call, its result, and the answer to that.
class GetWeather(BaseModel):
    """The weather somewhere."""

    city: Literal["Lisbon", "Oslo"]
    days: int = Field(ge=1, le=14)


tools = [openai.pydantic_function_tool(GetWeather)]
asked = client.chat.completions.parse(
    model=model, messages=hello, tools=tools, tool_choice="required", parallel_tool_calls=False
)
assert asked.choices[0].finish_reason == "tool_calls"
(call,) = asked.choices[0].message.tool_calls
assert isinstance(call.function.parsed_arguments, GetWeather)
# The turn goes back as the client has it, with all fields of its own.
turns = [
    *hello,
    asked.choices[0].message,
    {"role": "tool", "tool_call_id": call.id, "content": "18"},
]
answered = client.chat.completions.create(
    model=model, messages=turns, tools=tools, tool_choice="none", max_tokens=20
)
assert answered.choices[0].message.tool_calls is None
turns = [*turns, answered.choices[0].message, *hello]
client.chat.completions.create(model=model, messages=turns, max_tokens=5)
print("tools:", call.function.parsed_arguments)

named = {"type": "function", "function": {"name": "GetWeather"}}
with client.chat.completions.stream(
    model=model, messages=hello, tools=tools, tool_choice=named
) as stream:
    deltas = [e for e in stream if e.type == "tool_calls.function.arguments.delta"]
    final = stream.get_final_completion()
calls = final.choices[0].message.tool_calls
assert calls
assert all(isinstance(call.function.parsed_arguments, GetWeather) for call in calls)
assert "".join(delta.arguments_delta for delta in deltas if delta.index == 0) == (
    calls[0].function.arguments
)
print("streamed tools:", len(calls))

# Completions.
written = client.completions.create(
    model=model, prompt=["once", "twice"], max_tokens=5, n=2, logprobs=2
)
assert [choice.index for choice in written.choices] == [0, 1, 2, 3]
assert len(written.choices[0].logprobs.tokens) == len(written.choices[0].logprobs.token_logprobs)
with client.completions.create(model=model, prompt="once", max_tokens=5, stream=True) as stream:
    assert list(stream)[-1].choices[0].finish_reason in ("stop", "length")
print("completions")

# Models, and errors of the client's own classes.
assert [served.id for served in client.models.list()] == [model]
assert client.models.retrieve(model).id == model
for attempt, expected, code in [
    (lambda: client.embeddings.create(model=model, input="hi"), openai.NotFoundError, None),
    (lambda: client.models.retrieve("other"), openai.NotFoundError, "model_not_found"),
    (
        lambda: client.chat.completions.create(model=model, messages=hello, temperature=-1),
        openai.BadRequestError,
        None,
    ),
]:
    try:
        attempt()
    except expected as error:
        failure = error
    else:
        raise AssertionError(f"no {expected.__name__}")
    assert isinstance(failure.body, dict), failure
    assert failure.body["message"], failure
    assert code in (None, failure.code), failure
    print("error:", failure.status_code, failure.body["message"])

try:
    client.chat.completions.parse(model=model, messages=hello, response_format=Car, max_tokens=3)
except openai.LengthFinishReasonError as error:
    print("cut:", error.completion.choices[0].message.content)
else:
    raise AssertionError("an answer of three tokens cannot be whole")
