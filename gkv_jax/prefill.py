"""Reading a prompt into a row of the cache: whole where a policy must see all of it, else in chunks."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from gkv_jax.cache import Cache, CacheSpec, ChunkAttend, PromptAttend
from gkv_jax.models.protocol import Decoder, Params

SHORTEST = 32
"""Tokens of the smallest compiled prefill, unless the spec's chunks are shorter."""


def read_prompt(
    params: Params,
    cache: Cache,
    tokens: Sequence[int],
    row: int,
    *,
    model: Decoder,
    spec: CacheSpec,
    start: int = 0,
) -> Cache:
    """The cache with ``tokens`` in ``row``, where the next token will stand at position T.

    Args:
      params, model: the model.
      cache: donated.
      tokens: the prompt, T >= 0 ids, from the text's first on.
      row: of the batch; empty (``reset_row``), or holding the first ``start`` tokens.
      spec: the cache's.
      start: tokens that the row holds already; 0 if ``spec.selects(T)``.
    """
    for call in reading(params, tokens, row, model=model, spec=spec, start=start):
        cache = call.run(cache)
    return cache


@dataclasses.dataclass(frozen=True)
class Call:
    """A part of a prompt that the device reads at once.

    Attributes:
      params, model, spec: the model and the cache's size.
      tokens: int32 ``[L]``, padded.
      at: int32 scalars: the row, where the part starts if it is a chunk, and its length.
    """

    params: Params
    tokens: np.ndarray
    at: tuple[np.int32, ...]
    model: Decoder
    spec: CacheSpec

    @property
    def size(self) -> int:
        """Tokens that it computes, padding included."""
        return len(self.tokens)

    @property
    def _is_chunk(self) -> bool:
        return len(self.at) == 3

    def run(self, cache: Cache) -> Cache:
        """The cache, which is donated, with the part in it (asynchronously)."""
        program = prefill_chunk if self._is_chunk else prefill_whole
        return program(self.params, cache, self.tokens, *self.at, model=self.model, spec=self.spec)

    def compile(self, cache: Cache) -> None:
        """Compile what ``run`` needs for a cache of these shapes. Any thread may."""
        program = prefill_chunk if self._is_chunk else prefill_whole
        program.lower(
            self.params, cache, self.tokens, *self.at, model=self.model, spec=self.spec
        ).compile()


def reading(
    params: Params,
    tokens: Sequence[int],
    row: int,
    *,
    model: Decoder,
    spec: CacheSpec,
    start: int = 0,
) -> Iterator[Call]:
    """``read_prompt`` call by call. Between two of them, steps may change other rows of the cache."""
    if spec.selects(len(tokens)):
        padded = pad(tokens, bucket(len(tokens)))
        yield Call(params, padded, (np.int32(row), np.int32(len(tokens))), model, spec)
        return
    while start < len(tokens):
        chunk = tokens[start : start + spec.chunk_at(start)]
        padded = pad(chunk, min(bucket(len(chunk)), spec.longest_chunk))
        at = np.int32(row), np.int32(start), np.int32(len(chunk))
        yield Call(params, padded, at, model, spec)
        start += len(chunk)


def bucket(length: int) -> int:
    """The power of two, ``SHORTEST`` at least, to which so many tokens are padded."""
    return max(SHORTEST, 1 << math.ceil(math.log2(length)))


def pad(tokens: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
    """Tokens, then zeros up to ``size``: int32."""
    padded = np.zeros(size, np.int32)
    padded[: len(tokens)] = tokens
    return padded


@functools.partial(jax.jit, static_argnames=("model", "spec"), donate_argnames=("cache",))
def prefill_chunk(
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    row: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    model: Decoder,
    spec: CacheSpec,
) -> Cache:
    """Read ``length`` of ``tokens [L]`` into a row, the first at position ``start``.

    What only the hidden states need, XLA leaves out: the end of the last layer, and the logits of models
    that give logits.
    """
    return _chunk(params, cache, tokens, row, start, length, model, spec)[1]


@functools.partial(jax.jit, static_argnames=("model", "spec"), donate_argnames=("cache",))
def chunk_hidden(
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    row: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    model: Decoder,
    spec: CacheSpec,
) -> tuple[jax.Array, Cache]:
    """``prefill_chunk`` that also gives the hidden states ``[L,Dm]``, which evaluation scores."""
    return _chunk(params, cache, tokens, row, start, length, model, spec)


def _chunk(
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    row: jax.Array,
    start: jax.Array,
    length: jax.Array,
    model: Decoder,
    spec: CacheSpec,
) -> tuple[jax.Array, Cache]:
    attend = ChunkAttend(spec, model, cache, row, start, length, tokens.shape[0])
    hidden = model.hidden(params, tokens[None], attend)
    return hidden[0], attend.cache


@functools.partial(jax.jit, static_argnames=("model", "spec"), donate_argnames=("cache",))
def prefill_whole(
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    row: jax.Array,
    length: jax.Array,
    *,
    model: Decoder,
    spec: CacheSpec,
) -> Cache:
    """Read a prompt of ``length`` tokens, padded to ``tokens [L]``, keeping what the policy selects."""
    attend = PromptAttend(spec, model, cache, row, length, tokens.shape[0])
    model.hidden(params, tokens[None], attend)
    return attend.cache
