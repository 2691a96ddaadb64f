"""How an answer is sampled, drafted, cut and told: fields that several routes share."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from gkv_jax.drafts.drafter import Jump
from gkv_jax.errors import UserError
from gkv_jax.sampling import MAX_LOGPROBS, MAX_TEMPERATURE, Sampling
from gkv_jax.serve.errors import ApiError, refused
from gkv_jax.serve.protocol.base import Content, Strict, Text
from gkv_jax.serve.protocol.unserved import Unserved
from gkv_jax.serve.settings import Limits

# Each stop text is searched for after each token, by the thread that feeds the device.
MAX_STOP_TEXTS = 16
MAX_STOP_CHARACTERS = 256

StopText = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class StreamOptions(Strict):
    """``include_usage`` adds a last chunk with the usage and no choices."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        "include_obfuscation": Unserved("chunks are sent as they are", neutral=(False,)),
        "continuous_usage_stats": Unserved("use include_usage", neutral=(False,)),
    }

    include_usage: bool | None = None


class Prediction(Strict):
    """OpenAI's predicted outputs: a text that the answer is expected to resemble."""

    type: Literal["content"]
    content: Content


class CacheWanted(Strict):
    """The cache that an answer needs: refused unless it is the server's, which is one for all slots."""

    policy: str | None = None
    sinks: int | None = None
    kept: int | None = None
    window: int | None = None


class Sampled(BaseModel):
    """How to sample, with OpenAI's defaults, and what to say of it."""

    n: int | None = Field(None, ge=1, description="answers, each with a seed of its own; default 1")
    temperature: float | None = Field(
        None, ge=0, le=MAX_TEMPERATURE, description="0 is greedy; default 1"
    )
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="0 or -1 keeps all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(
        None, description="token ids as texts, and what is added to their logits, -100 to 100"
    )
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="default: a random one")
    stop: Annotated[
        list[StopText] | None,
        Field(max_length=MAX_STOP_TEXTS),
        BeforeValidator(_listed, json_schema_input_type=StopText | list[StopText] | None),
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    jump: Jump | None = Field(None, description="default verify")
    lookup: bool | None = Field(None, description="default false")
    draft_model: bool | None = Field(None, description="default true")
    cache: CacheWanted | None = None
    timeout: float | None = Field(
        None, gt=0, description="seconds after which the request fails; at most the server's limit"
    )
    trace: bool | None = Field(
        None, description="streams tell each token's source and how many were legal"
    )
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk for the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_stream(self) -> None:
        """Raises ApiError for what goes with a stream, without one."""
        if self.stream_options is not None and not self.stream:
            message = "stream_options goes with stream = true; leave it out, or stream"
            raise ApiError(400, message, param="stream_options", code="invalid_value")
        if self.trace and not self.stream:
            message = "trace goes with stream = true; leave it out, or stream"
            raise ApiError(400, message, param="trace", code="invalid_value")

    def samplings(
        self, max_tokens: int, limits: Limits, logprobs: int | None = None
    ) -> tuple[Sampling, ...]:
        """How to sample each of the ``n`` answers: they differ in the seed.

        Raises:
          ApiError: a value that cannot be sampled with, or more answers than the server allows.
        """
        count = 1 if self.n is None else self.n
        if count > limits.choices:
            message = f"n is {count}; this server allows {limits.choices}"
            raise ApiError(400, message, param="n", code="invalid_value")
        seed = secrets.randbits(63) if self.seed is None else self.seed
        try:
            return tuple(
                Sampling(
                    max_tokens=max_tokens,
                    temperature=1.0 if self.temperature is None else self.temperature,
                    top_k=max(0, self.top_k or 0),
                    top_p=1.0 if self.top_p is None else self.top_p,
                    min_p=self.min_p or 0.0,
                    presence_penalty=self.presence_penalty or 0.0,
                    frequency_penalty=self.frequency_penalty or 0.0,
                    logit_bias=self._logit_bias(),
                    seed=_wrapped(seed + index),
                    stop=tuple(self.stop or ()),
                    logprobs=logprobs,
                    jump=self.jump or "verify",
                    lookup=self.lookup or False,
                    prediction=None if self.prediction is None else self.prediction.content,
                    draft_model=self.draft_model is not False,
                )
                for index in range(count)
            )
        except UserError as error:
            raise refused(error) from error

    def seconds(self, limits: Limits) -> float:
        """How long the request may take.

        Raises:
          ApiError: longer than the server allows.
        """
        if self.timeout is None:
            return limits.request_seconds
        if self.timeout > limits.request_seconds:
            message = f"timeout is {self.timeout:g}; this server allows {limits.request_seconds:g}"
            raise ApiError(400, message, param="timeout", code="invalid_value")
        return self.timeout

    def _logit_bias(self) -> dict[int, float]:
        bias: dict[int, float] = {}
        for key, value in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                message = f"logit_bias has the key {key[:20]!r}; keys are token ids"
                raise ApiError(400, message, param="logit_bias", code="invalid_value")
            bias[int(key)] = value
        return bias


def checked_max_tokens(value: int | None, param: str, limits: Limits) -> int:
    """Tokens of the longest answer.

    Raises:
      ApiError: more than the server allows.
    """
    if value is None:
        return limits.default_completion_tokens
    if value > limits.completion_tokens:
        message = f"{param} is {value}; this server allows {limits.completion_tokens}"
        raise ApiError(400, message, param=param, code="invalid_value")
    return value


def checked_logprobs(value: int, param: str) -> int:
    """How many of the most likely tokens are told.

    Raises:
      ApiError: more than is served.
    """
    if not 0 <= value <= MAX_LOGPROBS:
        message = f"{param} is {value}; it must be from 0 to {MAX_LOGPROBS}"
        raise ApiError(400, message, param=param, code="invalid_value")
    return value


def _wrapped(seed: int) -> int:
    """The seed, in the range of 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63
