"""Sampling: what a request may ask for, and the arrays that say it for a batch of different requests.

The sampling itself is ``pallas_kernels.masked_sample``: the grammar mask, temperature, top-k, top-p,
min-p, then the draw, with noise from a hash of (request seed, text position, token id). So the same
request gives the same tokens whatever slot it runs in, whoever runs beside it, and with or without
drafts.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np

from gkv_jax.drafts.drafter import Jump
from gkv_jax.errors import UserError
from pallas_kernels.masked_sample import Rows

MAX_TEMPERATURE = 1000.0
"""Beyond it all tokens are equally likely to float32."""

MAX_LOGPROBS = 20
"""Most likely tokens that are reported at most, as in OpenAI's API."""

MAX_BIAS = 100.0
"""Of one token, either way, as in OpenAI's API."""

MAX_BIASED_TOKENS = 1024

MAX_PENALTY = 2.0
"""Either way, as in OpenAI's API."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one request samples.

    Attributes:
      max_tokens: most tokens to generate.
      temperature: 0 is greedy; at most ``MAX_TEMPERATURE``.
      top_k: keep the k most likely tokens (ties with the k-th too); 0 keeps all.
      top_p: keep the smallest set of most likely tokens with this much probability (arXiv
        1904.09751); 1 keeps all.
      min_p: drop tokens less likely than this fraction of the most likely one (arXiv 2407.01082).
      seed: same seed, same tokens.
      stop: texts that end the output (one as a plain string); they are not part of it.
      logprobs: report the log-probability of each token and of this many most likely ones (0 to 20),
        by the model before grammar and sampling; None reports none. While a request asks for them,
        steps read the whole LM head.
      logit_bias: what to add to a token's logit, by id: from -``MAX_BIAS`` to ``MAX_BIAS``, of at most
        ``MAX_BIASED_TOKENS`` tokens. A mapping or pairs; kept as pairs in the order of the ids.
      presence_penalty: subtracted from the logits of tokens that the output holds; from
        -``MAX_PENALTY``, which rewards repetition, to ``MAX_PENALTY``.
      frequency_penalty: the same, times how often the output holds the token.
      jump: what becomes of tokens that the grammar forces: ``verify`` takes them as drafts, which never
        changes the output; ``force`` takes them as output (the text obeys the grammar as ever, but is
        segmented as the tokenizer would, not as the model might); ``off`` lets the model write them.
      lookup: draft what followed when the last tokens occurred before, in prompt or output.
      prediction: a text that the output is expected to resemble (OpenAI's predicted outputs); drafts
        are taken from it.
      draft_model: let the engine's draft model draft, if it has one.

    Bias and penalties come before temperature and filters, and before the grammar, which they cannot
    overrule. While a request has any, steps read the whole LM head and fetch the sums from the host.

    Drafts need room in the cache (``CacheSpec.max_drafts``). They change the number of forward passes,
    never the output; under ``jump="force"`` the output does not depend on that room, either.

    Raises:
      UserError: a value out of range, naming the field.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: str | tuple[str, ...] = ()
    logprobs: int | None = None
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    jump: Jump = "verify"
    lookup: bool = False
    prediction: str | None = None
    draft_model: bool = True

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_integer("top_k", self.top_k, 0, 2**31 - 1)
        _check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        object.__setattr__(self, "logit_bias", _sorted_bias(self.logit_bias))
        if self.top_p == 0.0:
            raise UserError("sampling.top_p is 0; it must be > 0 (1 keeps all tokens)")
        if not isinstance(self.stop, Sequence) or not all(
            isinstance(text, str) and text for text in self.stop_texts
        ):
            raise UserError(f"sampling.stop is {self.stop!r}; it must hold non-empty strings")

        if self.jump not in get_args(Jump):
            raise UserError(f"sampling.jump is {self.jump!r}; choose from {get_args(Jump)}")
        for name in ("lookup", "draft_model"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(
                    f"sampling.{name} is {getattr(self, name)!r}; it must be True or False"
                )
        if self.prediction is not None and not isinstance(self.prediction, str):
            raise UserError(f"sampling.prediction is {self.prediction!r}; it must be a string")

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """``stop`` as a tuple, however it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_biased(self) -> bool:
        """Whether bias or penalties may change any logit."""
        has_bias = any(value != 0.0 for value in dict(self.logit_bias).values())
        return has_bias or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _sorted_bias(bias: object) -> tuple[tuple[int, float], ...]:
    """``logit_bias``, checked, as pairs in the order of the ids."""
    pairs = list(bias.items()) if isinstance(bias, Mapping) else bias
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
    ):
        raise UserError(f"sampling.logit_bias is {bias!r}; it must map token ids to numbers")
    if len(pairs) > MAX_BIASED_TOKENS:
        raise UserError(
            f"sampling.logit_bias is of {len(pairs)} tokens; give at most {MAX_BIASED_TOKENS}"
        )
    for token, value in pairs:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise UserError(
                f"sampling.logit_bias is for token {token!r}; token ids must be integers >= 0"
            )
        _check_number(f"logit_bias[{token}]", value, -MAX_BIAS, MAX_BIAS)
    if len(dict(pairs)) < len(pairs):
        raise UserError("sampling.logit_bias is given twice for a token; give each token once")
    return tuple(sorted((token, float(value)) for token, value in pairs))


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise UserError(f"sampling.{name} is {value!r}; it must be a number")
    if not low <= value <= high:
        raise UserError(f"sampling.{name} is {value!r}; it must be from {low:g} to {high:g}")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"sampling.{name} is {value!r}; it must be an integer from {low} to {high}")


def greedy_rows(batch: int) -> Rows:
    """``Sampling()`` of ``batch`` rows as host arrays, for ``set_row``.

    All that differs between requests is in arrays, so that no request retraces anything.
    """
    return Rows(
        temperature=np.zeros(batch, np.float32),
        top_k=np.zeros(batch, np.int32),
        top_p=np.ones(batch, np.float32),
        min_p=np.zeros(batch, np.float32),
        seed=np.zeros(batch, np.uint32),
    )


def set_row(rows: Rows, row: int, sampling: Sampling) -> None:
    """Write one request's parameters into host arrays, in place."""
    for name in ("temperature", "top_k", "top_p", "min_p"):
        getattr(rows, name)[row] = getattr(sampling, name)
    # A hash of all 64 bits, so that seeds that differ anywhere differ here.
    mixed = np.random.SeedSequence(sampling.seed % 2**64).generate_state(1, np.uint32)
    rows.seed[row] = mixed[0]
