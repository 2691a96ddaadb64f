"""``POST /v1/completions``: a text to continue, without a chat template."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field, PlainValidator, TypeAdapter
from pydantic_core import PydanticCustomError

from gkv_jax.sampling import Sampling
from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.protocol.base import Strict, Text
from gkv_jax.serve.protocol.formats import Constrained
from gkv_jax.serve.protocol.sampling import Sampled, checked_logprobs, checked_max_tokens
from gkv_jax.serve.protocol.unserved import UNSERVED_IN_COMPLETIONS
from gkv_jax.serve.settings import Limits

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]

_STRICT = ConfigDict(strict=True)
_TOKEN_IDS = TypeAdapter(TokenIds, config=_STRICT)
_TEXT = TypeAdapter(Text, config=_STRICT)
_TEXTS = TypeAdapter(list[Text], config=_STRICT)
_LISTS = TypeAdapter(list[TokenIds], config=_STRICT)


def _prompts(value: Any) -> Any:
    """One kind or another; a union's errors would name its members as if they were fields."""
    if isinstance(value, str):
        return _TEXT.validate_python(value)
    if not isinstance(value, list):
        message = "Input should be a text, token ids, or a list of either"
        raise PydanticCustomError("union_type", message)
    first = next(iter(value), None)
    if isinstance(first, str):
        return _TEXTS.validate_python(value)
    return (_LISTS if isinstance(first, list) else _TOKEN_IDS).validate_python(value)


Prompts = Annotated[
    str | list[Any],
    PlainValidator(
        _prompts,
        json_schema_input_type=Text
        | TokenIds
        | Annotated[list[Text] | list[TokenIds], Field(min_length=1)],
    ),
]


class CompletionRequest(Strict, Sampled, Constrained):
    """The body. ``prompt`` is a text or token ids, or a list of either: each gets ``n`` answers."""

    unserved = UNSERVED_IN_COMPLETIONS

    model: Text
    prompt: Prompts
    max_tokens: int | None = Field(None, ge=1, description="default 16, as OpenAI has it")
    logprobs: int | None = Field(
        None,
        description="tell the likelihoods of each token and of this many likely ones, up to 20",
    )

    def prompts(self) -> list[Any]:
        """Each prompt."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if several else [self.prompt]

    def check(self) -> None:
        """Raises ApiError for fields that contradict each other."""
        self.check_stream()
        if self.prompt == "":
            message = "prompt is empty; give at least one character"
            raise ApiError(400, message, param="prompt", code="invalid_prompt")

    def answers(self, limits: Limits) -> tuple[Sampling, ...]:
        """How to sample each answer.

        Raises:
          ApiError: more than the server allows, or values that cannot be sampled with.
        """
        max_tokens = checked_max_tokens(self.max_tokens or 16, "max_tokens", limits)
        logprobs = None if self.logprobs is None else checked_logprobs(self.logprobs, "logprobs")
        return self.samplings(max_tokens, limits, logprobs)
