"""Instructor, in each of its modes for OpenAI's API.

python instructor_client.py BASE_URL MODEL
"""

import enum
import logging
import sys
from typing import Annotated, Any, Literal

import instructor
import openai
from instructor import Mode
from pydantic import BaseModel, Field

base_url, model = sys.argv[1:]
logging.disable()
server = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
ask = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_retries": 0}


class Role(enum.Enum):
    READER = "reader"
    WRITER = "writer"


class Job(BaseModel, extra="forbid"):
    roles: list[Role] = Field(max_length=3)


class Address(BaseModel, extra="forbid"):
    kind: Literal["home", "work"]
    number: int = Field(ge=1, le=99)


class User(BaseModel, extra="forbid"):
    """Somebody with an account."""

    age: int = Field(ge=0, le=120)
    addresses: list[Address] = Field(max_length=2)
    manager: Literal["Ann", "Bob"] | None


class Note(BaseModel):
    text: Annotated[str, Field(max_length=8)] = "nothing"


for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
    client = instructor.from_openai(server, mode=mode)
    user, completion = client.create_with_completion(response_model=User, **ask)
    assert isinstance(user, User)
    assert completion.usage.completion_tokens > 0
    job = client.create(response_model=Job, **ask)
    assert all(isinstance(role, Role) for role in job.roles)
    print(mode.name, user, job)
    partial = list(client.create_partial(response_model=User, **ask))
    assert len(partial) > 1
    assert User.model_validate(partial[-1].model_dump())
    print(mode.name, "create_partial", len(partial))

# In JSON mode any object may come: `}` as soon as it is legal makes it `{}`.
client = instructor.from_openai(server, mode=Mode.JSON)
tokens = server.with_options(base_url=base_url.removesuffix("/v1")).post(
    "/tokenize", body={"prompt": "}", "add_special_tokens": False}, cast_to=object
)["tokens"]
bias = {str(token): 100 for token in tokens}
note = client.create(response_model=Note, logit_bias=bias, **ask)
assert note.text == "nothing", note
print("JSON")


# Nothing makes the model write JSON into its Markdown, unless the server is asked to. And the schemas that
# Instructor sends for lists are open: a random model would never end.
def obeying(asked: type[BaseModel]) -> dict[str, Any]:
    return {"structured_outputs": {"json": asked.model_json_schema()}}


class Jobs(BaseModel, extra="forbid"):
    tasks: list[Job] = Field(min_length=1, max_length=3)


client = instructor.from_openai(server, mode=Mode.MD_JSON)
assert isinstance(client.create(response_model=Job, extra_body=obeying(Job), **ask), Job)
jobs = list(client.create_iterable(response_model=Job, extra_body=obeying(Jobs), **ask))
assert jobs
assert all(isinstance(job, Job) for job in jobs)
print("MD_JSON, create_iterable", len(jobs))
