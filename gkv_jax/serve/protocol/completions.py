"""``POST /v1/completions``: a text to continue, without a chat template."""

from typing import Annotated, Any

from pydantic import Field

from gkv_jax.sampling import Sampling
from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.protocol.base import Strict, Text
from gkv_jax.serve.protocol.formats import Constrained
from gkv_jax.serve.protocol.sampling import Sampled, checked_logprobs, checked_max_tokens
from gkv_jax.serve.protocol.unserved import UNSERVED_IN_COMPLETIONS
from gkv_jax.serve.settings import Limits

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Prompts = Text | TokenIds | Annotated[list[Text] | list[TokenIds], Field(min_length=1)]


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
