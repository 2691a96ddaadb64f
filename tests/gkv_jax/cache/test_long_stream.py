"""A stream of a million tokens: what it says at its end depends on the sinks and on the end alone.

Through L layers a query depends on the sinks and on L windows. So after any number of tokens, the
logits must be those of a run that read the sinks and then the last tokens only, far nearer to 0. What
differs is rounding: the angles of rotations, and nothing that adds up.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax.cache import Cache, CacheSpec, init_cache
from gkv_jax.models.llama import Llama
from gkv_jax.prefill import prefill_chunk
from gkv_jax.step import StepInputs, forward
from tests.gkv_jax.tiny import random_params, tiny_config

CONFIG = tiny_config()
MODEL = Llama(CONFIG)
PARAMS = random_params(CONFIG)
SPEC = CacheSpec(sinks=4, window=60)
CHUNK = 512
LAST = 1000
"""Tokens that are compared, read one by one."""
BEFORE = CONFIG.num_layers * SPEC.window
"""Tokens before them that they may depend on."""
TOLERANCE = 1e-4


def tokens_at(positions: np.ndarray | jax.Array) -> jax.Array:
    """The stream's tokens, int32: any part can be made at any time."""
    mixed = jnp.asarray(positions, jnp.uint32) * jnp.uint32(2654435761)
    return ((mixed >> 15) % jnp.uint32(CONFIG.vocab_size)).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("chunks",), donate_argnames=("cache",))
def read_chunks(cache: Cache, first: jax.Array, chunks: int) -> Cache:
    """Read so many chunks of the stream into the only row, from position ``first`` on."""

    def one(cache: Cache, start: jax.Array) -> tuple[Cache, None]:
        cache = prefill_chunk(
            PARAMS,
            cache,
            tokens_at(start + jnp.arange(CHUNK)),
            jnp.int32(0),
            start,
            jnp.int32(CHUNK),
            model=MODEL,
            spec=SPEC,
        )
        return cache, None

    cache, _ = jax.lax.scan(one, cache, first + CHUNK * jnp.arange(chunks))
    return cache


@jax.jit
def read_steps(cache: Cache, positions: jax.Array, seen_as: jax.Array) -> jax.Array:
    """Logits ``[T,V]`` of the stream's tokens at ``positions [T]``, one a step, standing at ``seen_as``."""

    def one(cache: Cache, at: tuple[jax.Array, jax.Array]) -> tuple[Cache, jax.Array]:
        token, position = at
        inputs = StepInputs(
            tokens=token[None, None],
            n_drafts=jnp.zeros(1, jnp.int32),
            active=jnp.ones(1, bool),
            logprobs=jnp.array(False),
            go=jnp.array(True),
            next_pos=position[None],
        )
        hidden, cache, _ = forward(PARAMS, cache, inputs, model=MODEL, spec=SPEC)
        return cache, MODEL.logits(PARAMS, hidden)[0, 0]

    return jax.lax.scan(one, cache, (tokens_at(positions), seen_as))[1]


def empty() -> Cache:
    return init_cache(SPEC, MODEL, 1, jnp.float32)


def rebased(first: int, at: int, before: int = BEFORE) -> np.ndarray:
    """Logits of the stream from ``first`` on, as if it stood at ``at``, after no more than it needs."""
    sinks = np.arange(SPEC.sinks)
    tail = np.arange(-before, LAST + BEFORE - before)
    positions, seen_as = (np.concatenate([sinks, start + tail]) for start in (first, at))
    logits = read_steps(empty(), jnp.int32(positions), jnp.int32(seen_as))
    return np.asarray(logits)[SPEC.sinks + before :][:LAST]


def furthest(actual: np.ndarray, expected: np.ndarray) -> float:
    assert np.ptp(expected) > 5  # logits that say something
    return float(np.abs(actual - expected).max())


@pytest.mark.parametrize(
    "tokens", [10**5, pytest.param(10**6, marks=pytest.mark.full)], ids=["100k", "1M"]
)
def test_a_long_stream_does_not_drift(tokens: int) -> None:
    chunks = -(-tokens // CHUNK)
    cache, first = read_chunks(empty(), jnp.int32(0), chunks), chunks * CHUNK
    positions = jnp.int32(first + np.arange(SPEC.sinks + BEFORE + LAST))
    streamed = np.asarray(read_steps(cache, positions, positions))[:LAST]
    assert furthest(streamed, rebased(first, 1000)) < TOLERANCE
    # The comparison can fail: it would with the tokens of a single window before the first.
    assert furthest(streamed, rebased(first, 1000, SPEC.window)) > 100 * TOLERANCE


@pytest.mark.parametrize("end", [10**6, 2**24 + LAST, 2**31 - 1], ids=["1M", "2**24", "int32"])
def test_positions_far_out_are_as_good_as_near_ones(end: int) -> None:
    """Where float32 has no odd numbers any more, and near the last position that int32 can count."""
    assert furthest(rebased(3000, end - LAST), rebased(3000, 1000)) < TOLERANCE
