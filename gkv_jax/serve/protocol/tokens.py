"""Bodies of the routes that generate nothing: tokens and back, as vLLM has them, and checks of guides."""

from typing import Annotated

from pydantic import Field, model_validator

from gkv_jax.serve.protocol.base import Strict, Text
from gkv_jax.serve.protocol.chat import Message
from gkv_jax.serve.protocol.formats import Constrained


class TokenizeRequest(Strict):
    """A text, or messages, which become the prompt that the model would read."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = Field(True, description="of a prompt")
    add_generation_prompt: bool = Field(True, description="of messages")
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class GuideCheckRequest(Strict, Constrained):
    """What shall constrain an answer, as in a request for one."""

    model: Text | None = None


class DetokenizeRequest(Strict):
    """Token ids."""

    model: Text | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
