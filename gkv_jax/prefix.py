"""Prompt prefixes that requests share: read once, copied into the row of whoever begins with them.

What a token's keys and values are depends on nothing after it, so the cached prefix of one prompt is
that of every prompt with the same first tokens, as long as nothing has been evicted from it. What a
score policy has selected is not: it depends on the prompt's end. So only rows that still hold all of
their text are kept here.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gkv_jax.cache import Cache, CacheSpec, Layout
from gkv_jax.cache.segments import EMPTY
from gkv_jax.errors import UserError
from gkv_jax.models.protocol import Decoder

Tokens = tuple[int, ...]


class PrefixStore:
    """The last few prefixes that were read with the same weights, each as a row of the cache."""

    def __init__(self, spec: CacheSpec, model: Decoder, most: int = 8) -> None:
        """``most`` is how many are held; the one that was used longest ago makes room."""
        self._spec, self._most = spec, most
        # What a row holds of a part of its text is what reading that part alone would have left, up to
        # here: then the model's own windows close, too. A policy's memory and the scales of int8 are
        # those of the whole.
        depends_on_all = spec.evictor is not None or spec.dtype == "int8"
        holds = [each.sinks + each.window - 1 for each in Layout.of(spec, model).specs]
        self._divisible = 0 if depends_on_all else min(holds)
        self._rows: collections.OrderedDict[Tokens, Cache] = collections.OrderedDict()

    def check(self, length: int) -> None:
        """Raise UserError if a prefix of so many tokens would lose some of them in the cache."""
        if self._spec.memory == "host":
            raise UserError(
                "cache.memory is 'host', where prefixes are not shared; use memory 'device'"
            )
        chunk = self._spec.prefill_chunk
        if self._spec.dtype == "int8" and length < chunk:
            raise UserError(
                f"prefix has {length} tokens, but the scales of int8 are those of a text's first "
                f"{chunk}; share as many, or set cache.prefill_chunk to at most {length}"
            )
        holds = self._spec.sinks + self._spec.window - 1
        if length <= holds:
            return
        if self._spec.max_tokens is not None:
            raise UserError(
                f"prefix has {length} tokens, more than the {holds} that the cache has room for "
                "beside an answer; set cache.window higher, or shorten it"
            )
        raise UserError(
            f"prefix has {length} tokens, more than the {holds} that the cache holds before it "
            f"evicts; set cache.sinks to {length} to keep it for good, or shorten it"
        )

    def add(self, tokens: Tokens, cache: Cache, row: int) -> Cache:
        """Keep a copy of ``row``, which holds ``tokens`` and nothing else. Donates ``cache``."""
        copy = self._rows[tokens] = _take(cache, np.int32(row))
        self._rows.move_to_end(tokens)
        while len(self._rows) > self._most:
            self._rows.popitem(last=False)
        # It is there already; but now the program is compiled, and no request waits for that.
        return _put(cache, np.int32(row), copy, np.int32(len(tokens)))

    def begin(self, cache: Cache, row: int, tokens: Sequence[int]) -> tuple[Cache, int]:
        """``cache`` (donated) with what is known of ``tokens`` in ``row``, and how many tokens that is.

        The row must be empty. Nothing is shared where the policy wants to read the prompt whole.
        """
        if self._spec.selects(len(tokens)):
            return cache, 0
        shared = {known: _common(known, tokens) for known in self._rows}
        shared = {
            known: n
            for known, n in shared.items()
            if n == len(known) or len(known) <= self._divisible
        }
        best = max(shared, key=shared.__getitem__, default=())
        length = shared.get(best, 0)
        if length == 0:
            return cache, 0
        self._rows.move_to_end(best)
        return _put(cache, np.int32(row), self._rows[best], np.int32(length)), length


def _common(known: Tokens, tokens: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = zip(known, tokens, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(known), len(tokens)))


@jax.jit
def _take(cache: Cache, row: jax.Array) -> Cache:
    """One row, as a batch of one."""
    return jax.tree.map(lambda leaf: leaf[row][None], cache)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _put(cache: Cache, row: jax.Array, prefix: Cache, length: jax.Array) -> Cache:
    """Write the first ``length`` tokens of ``prefix``, a batch of one, to ``row``."""
    cache = jax.tree.map(lambda leaf, new: leaf.at[row].set(new[0]), cache, prefix)
    slots = []
    for each in cache.slots:
        held = each.slot_pos[row]
        held = jnp.where(held < length, held, EMPTY)
        slots.append(dataclasses.replace(each, slot_pos=each.slot_pos.at[row].set(held)))
    return Cache(layers=cache.layers, slots=tuple(slots))
