"""Bodies of the routes that generate nothing: tokens and back, as vLLM has them, and checks of guides."""

from typing import Annotated

from pydantic import Field

from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.protocol.base import Strict, TemplateValues, Text
from gkv_jax.serve.protocol.chat import Message
from gkv_jax.serve.protocol.formats import Constrained
from gkv_jax.serve.tools import Tool


class TokenizeRequest(Strict):
    """A text, or messages, which become the prompt that the model would read."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = Field(None, description="of messages")
    chat_template_kwargs: TemplateValues | None = Field(None, description="of messages")
    add_special_tokens: bool = Field(True, description="of a prompt")
    add_generation_prompt: bool = Field(True, description="of messages")
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raises ApiError for fields that contradict each other."""
        if self.prompt is None and self.messages is None:
            message = "nothing to tokenize; give prompt or messages"
            raise ApiError(400, message, param="prompt", code="missing_required_parameter")
        for name in ("messages", "tools", "chat_template_kwargs"):
            if self.prompt is not None and getattr(self, name) is not None:
                message = f"{name} and prompt exclude each other; leave one of them out"
                raise ApiError(400, message, param=name, code="invalid_value")


class GuideCheckRequest(Strict, Constrained):
    """What shall constrain an answer, as in a request for one."""

    model: Text | None = None


class DetokenizeRequest(Strict):
    """Token ids."""

    model: Text | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
