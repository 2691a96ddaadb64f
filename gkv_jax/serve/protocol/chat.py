"""``POST /v1/chat/completions``: OpenAI's chat completion request."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gkv_jax.sampling import Sampling
from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.protocol.base import Content, Effort, Strict, TemplateValues, Text
from gkv_jax.serve.protocol.formats import Constrained
from gkv_jax.serve.protocol.sampling import Sampled, checked_logprobs, checked_max_tokens
from gkv_jax.serve.protocol.unserved import UNSERVED_IN_CHATS, UNSERVED_IN_MESSAGES
from gkv_jax.serve.settings import Limits
from gkv_jax.serve.tools import Tool, ToolCallField, ToolChoice


class Message(Strict):
    """One turn of the chat. ``developer`` is OpenAI's newer word for ``system``."""

    unserved = UNSERVED_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None
    tool_calls: Annotated[list[ToolCallField], Field(min_length=1)] | None = Field(
        None, description="of an assistant's turn"
    )
    tool_call_id: str | None = Field(None, description="of a tool's turn: the call it answers")
    reasoning_content: Text | None = Field(
        None, description="of an assistant's turn: what it thought before it answered"
    )
    parsed: Any = Field(
        None, exclude=True, description="a copy that OpenAI's client adds when it sends a turn back"
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_what_says_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("role") == "assistant":
            if values.get("tool_calls") == []:
                values = _without(values, "tool_calls")
            if values.get("tool_calls") or values.get("reasoning_content") is not None:
                return {"content": None} | values
        # Older clients name the function here, too; the call that tool_call_id names has it.
        if values.get("role") == "tool" and isinstance(values.get("name"), str):
            return _without(values, "name")
        return values

    @model_validator(mode="after")
    def _check_role(self) -> "Message":
        if self.content is None and self.tool_calls is None and self.reasoning_content is None:
            raise ValueError("content is null; give a text")
        for name in ("tool_calls", "reasoning_content"):
            if getattr(self, name) is not None and self.role != "assistant":
                raise ValueError(f"{name} belong to role 'assistant'")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("role 'tool' and a field 'tool_call_id' go together")
        return self


def _without(values: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != field}


class ChatCompletionRequest(Strict, Sampled, Constrained):
    """The body.

    ``user``, ``safety_identifier``, ``prompt_cache_key`` and ``metadata`` are notes of the client
    to itself: by their definition they change nothing in the answer.
    """

    unserved = UNSERVED_IN_CHATS

    model: Text
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="0 to 20; goes with logprobs")
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateValues | None = Field(
        None, description="variables for the chat template, such as enable_thinking"
    )
    reasoning_effort: Effort | None = Field(
        None, description="for chat templates that read it, or that let the model think or not"
    )
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None

    def check(self) -> None:
        """Raises ApiError for fields that contradict each other."""
        self.check_stream()
        if self.top_logprobs and not self.logprobs:
            message = "top_logprobs goes with logprobs = true; leave it out, or ask for both"
            raise ApiError(400, message, param="top_logprobs", code="invalid_value")

    def answers(self, limits: Limits) -> tuple[Sampling, ...]:
        """How to sample each answer.

        Raises:
          ApiError: more than the server allows, values that cannot be sampled with, or fields that
            contradict each other.
        """
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            message = "max_tokens and max_completion_tokens differ; give only the latter"
            raise ApiError(400, message, param="max_tokens", code="invalid_value")
        param = "max_completion_tokens" if old is None else "max_tokens"
        max_tokens = checked_max_tokens(new if old is None else old, param, limits)
        logprobs = checked_logprobs(self.top_logprobs or 0, "top_logprobs")
        return self.samplings(max_tokens, limits, logprobs if self.logprobs else None)
