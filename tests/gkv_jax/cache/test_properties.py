"""What must hold of every cache, drawn at random. Each oracle has one home, here or beside its subject:

============================================  =======================================================
the ring equals a list                        ``test_streaming``, ``test_snapkv``, ``test_evict``; for
                                              chunks and steps mixed at random, here
chunks do not matter                          ``test_streaming``, ``test_evict``; here
a dense masked run with ranks per query       here (streaming)
rejected drafts leave no trace                ``test_streaming``, ``test_evict``; here for Quest
a row alone equals the row in a batch         ``test_streaming``; here bit by bit, under every policy
a used row equals a fresh one                 here, bit by bit, under every policy
the phase of the ring does not matter         here
places for a whole prompt equal a full cache  here, under every score policy
padding has no say                            here, under every score policy
all pages equal a full cache                  here
a learned sink of minus infinity is none      here, through all three forms of attention
attention received sums up to the queries     ``test_evict``; here with rejected drafts
the window counts its own token               here
ties, NaN and infinity among scores           here
bytes do not depend on the text               ``test_streaming``, ``test_report``; here from the shapes
one program for all positions                 here
a million tokens                              ``test_long_stream``
a score equals its definition                 ``policies/test_scores``
============================================  =======================================================
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkv_jax.cache import Cache, CacheSpec, Evidence, Policy, init_cache, reset_row
from gkv_jax.cache.prompt import select
from gkv_jax.decode import StepInputs, forward, prefill_chunk, prefill_whole
from gkv_jax.models.llama import Llama
from gkv_jax.models.protocol import Attend, Params
from gkv_jax.prefill import read_prompt
from gkv_jax.rope import inverse_frequencies
from tests.gkv_jax.cache import test_evict, test_streaming
from tests.gkv_jax.cache.test_streaming import CONFIG, MODEL, PARAMS, SPEC, TEXT, close, inputs_for
from tests.gkv_jax.oracle import ListCache
from tests.gkv_jax.tiny import random_params, tiny_config

seeds = st.integers(0, 2**32 - 1)


def some(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True)


def random_text(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, CONFIG.vocab_size, length).tolist()


def read_chunk(
    cache: Cache,
    tokens: list[int],
    start: int,
    spec: CacheSpec = SPEC,
    *,
    padded: int = 7,
    model: Llama = MODEL,
    params: Params = PARAMS,
) -> tuple[np.ndarray, Cache]:
    """Logits of a chunk of at most ``padded`` tokens in row 1 of two."""
    chunk = np.zeros(padded, np.int32)
    chunk[: len(tokens)] = tokens
    hidden, cache = prefill_chunk(
        params,
        cache,
        chunk,
        np.int32(1),
        np.int32(start),
        np.int32(len(tokens)),
        model=model,
        spec=spec,
    )
    return np.asarray(model.logits(params, hidden))[: len(tokens)], cache


# --- Streaming ---


@functools.cache
def expected_logits(name: str) -> np.ndarray:
    return test_streaming.oracle_logits(TEXT, test_streaming.SPECS[name])


@pytest.mark.parametrize("name", ["sinks and window", "true positions", "window of one"])
@some(6)
@given(seed=seeds)
def test_chunks_and_steps_in_any_order_equal_the_list(name: str, seed: int) -> None:
    """Of any size, at any phase of the ring, with drafts of which some are wrong."""
    spec, rng, expected = test_streaming.SPECS[name], np.random.default_rng(seed), expected_logits(name)
    cache, at = init_cache(spec, MODEL, 2, jnp.float32), 0
    while at < len(TEXT):
        left = len(TEXT) - at
        if rng.random() < 0.4:
            count = min(int(rng.integers(1, 8)), left)
            logits, cache = read_chunk(cache, TEXT[at : at + count], at, spec)
        else:
            count = min(int(rng.integers(1, spec.queries + 1)), left)
            wrong = random_text(rng, spec.queries - count)
            rows = inputs_for([None, (TEXT[at : at + count] + wrong, at)], spec)
            logits, cache = test_streaming.step(cache, rows, spec=spec)
            logits = logits[1, :count]
        close(logits, expected[at : at + count])
        at += count


@pytest.mark.parametrize("length", [SPEC.sinks + SPEC.window + more for more in (-2, -1, 0, 1)])
def test_a_prompt_that_just_fills_the_window(length: int) -> None:
    expected = expected_logits("sinks and window")
    cache = init_cache(SPEC, MODEL, 2, jnp.float32)
    for start in range(0, length, 7):
        _, cache = read_chunk(cache, TEXT[start : min(start + 7, length)], start)
    for at in range(length, length + 3):
        rows = inputs_for([None, ([TEXT[at]], at)], SPEC)
        logits, cache = test_streaming.step(cache, rows, spec=SPEC)
        close(logits[1, 0], expected[at])


def dense_logits(text: list[int], spec: CacheSpec) -> np.ndarray:
    """Float64 logits ``[T,V]``: one masked pass over the text, keys at their rank for each query."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), PARAMS)
    at = np.arange(len(text))
    seen = (at <= at[:, None]) & ((at < spec.sinks) | (at > at[:, None] - spec.window))
    rank = seen.cumsum(axis=1) - 1 if spec.positions == "cache" else np.tile(at, (len(at), 1))
    distance = np.diagonal(rank)[:, None] - rank
    turn = np.exp(1j * distance[..., None] * inverse_frequencies(CONFIG.rope, CONFIG.head_dim))
    half, groups = CONFIG.head_dim // 2, CONFIG.num_heads // CONFIG.num_kv_heads

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + CONFIG.rms_norm_eps)

    def heads(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return (x @ weight).reshape(len(text), -1, CONFIG.head_dim)

    x = params["embed"][text]
    for layer in params["layers"]:
        h = norm(x, layer["attn_norm"])
        q, k, v = (heads(h, layer[name]) for name in "qkv")
        k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
        # Channel pairs as complex numbers: only the difference of two rotations is left.
        q, k = (each[..., :half] + 1j * each[..., half:] for each in (q, k))
        scores = np.einsum("ihf,jhf,ijf->hij", q, k.conj(), turn).real / CONFIG.head_dim**0.5
        weights = np.exp(np.where(seen, scores, -np.inf))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hij,jhd->ihd", weights, v).reshape(len(text), -1) @ layer["o"]
        h = norm(x, layer["mlp_norm"])
        gate = h @ layer["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["up"])) @ layer["down"]
    return norm(x, params["norm"]) @ params["embed"].T


@pytest.mark.parametrize("name", ["sinks and window", "true positions", "window of one"])
@some(4)
@given(seed=seeds)
def test_streaming_equals_a_dense_run_with_ranks_for_each_query(name: str, seed: int) -> None:
    spec, text = test_streaming.SPECS[name], random_text(np.random.default_rng(seed), 45)
    expected = dense_logits(text, spec)
    cache = init_cache(spec, MODEL, 2, jnp.float32)
    for start in range(0, len(text), 7):
        logits, cache = read_chunk(cache, text[start : start + 7], start, spec)
        close(logits, expected[start : start + 7])


@some(10)
@given(seed=seeds)
def test_the_phase_of_the_ring_does_not_matter(seed: int) -> None:
    """After the sinks a text goes on far away, at one position or another: only distances count."""
    rng = np.random.default_rng(seed)
    sinks, text = random_text(rng, SPEC.sinks), random_text(rng, 21)
    results = []
    for first in rng.integers(SPEC.sinks + SPEC.window, 2**30, 2).tolist():
        _, cache = read_chunk(init_cache(SPEC, MODEL, 2, jnp.float32), sinks, 0)
        parts = []
        for start in range(0, len(text), 7):
            logits, cache = read_chunk(cache, text[start : start + 7], first + start)
            parts.append(logits)
        results.append(np.concatenate(parts))
    np.testing.assert_allclose(results[0], results[1], atol=2e-5)


@functools.cache
def one_layer() -> tuple[Llama, Params]:
    config = tiny_config(num_layers=1)
    return Llama(config), random_params(config)


def test_a_query_sees_the_sinks_and_a_window_that_counts_itself() -> None:
    """One layer, so that nothing is seen second-hand: which other token would change the output?"""
    (model, params), last = one_layer(), 27
    text = TEXT[: last + 1]

    def final(tokens: list[int]) -> np.ndarray:
        cache = init_cache(SPEC, model, 2, jnp.float32)
        for start in range(0, len(tokens), 7):
            part = tokens[start : start + 7]
            logits, cache = read_chunk(cache, part, start, model=model, params=params)
        return logits[-1]

    reference = final(text)
    for position in range(last + 1):
        changed = [*text[:position], (text[position] + 1) % CONFIG.vocab_size, *text[position + 1 :]]
        is_seen = position < SPEC.sinks or position > last - SPEC.window
        assert (np.abs(final(changed) - reference).max() > 1e-4) == is_seen
        assert is_seen or (final(changed) == reference).all()


# --- Rows of a batch, under every policy ---

CHOOSING = ["h2o every 4", "tova every 4", "snapkv every 8", "keydiff every 4"]


def run_row(
    spec: CacheSpec, cache: Cache, text: list[int], neighbour: list[int] | None
) -> np.ndarray:
    """Logits of ``text`` in row 1, two tokens a step where they fit, beside another text or none."""
    out, at, other = [], 0, 0
    while at < len(text):
        count = min(1 + spec.room_for_drafts(at), 2, len(text) - at)
        rows: list[tuple[list[int], int] | None] = [None, (text[at : at + count], at)]
        if neighbour is not None and other < len(neighbour):
            rows[0] = ([neighbour[other]], other)
        counts = jnp.array([int(rows[0] is not None), count], jnp.int32)
        logits, cache = test_evict.step(cache, inputs_for(rows, spec), counts, spec=spec)
        out.append(np.asarray(logits[1, :count]))
        at, other = at + count, other + int(rows[0] is not None)
    return np.concatenate(out)


@pytest.mark.parametrize("name", ["window", *CHOOSING])
@some(3)
@given(seed=seeds)
def test_a_row_knows_neither_neighbours_nor_predecessors(name: str, seed: int) -> None:
    """Bit by bit: alone in a new cache, or beside others where texts and garbage were before."""
    spec = SPEC if name == "window" else test_evict.SPECS[name]
    rng = np.random.default_rng(seed)
    text, before, neighbour = (random_text(rng, n) for n in (30, int(rng.integers(1, 40)), 35))
    new = init_cache(spec, MODEL, 2, jnp.float32)
    expected = run_row(spec, new, text, None)

    def garbage(leaf: jax.Array) -> jax.Array:
        return jnp.full_like(leaf, 1e30) if leaf.dtype == jnp.float32 else leaf

    used = jax.tree.map(garbage, new)
    used = read_prompt(PARAMS, used, before, 1, model=MODEL, spec=SHORT_READS(spec))
    for row in range(2):
        used = reset_row(used, np.int32(row), spec=spec, model=MODEL)
    np.testing.assert_array_equal(run_row(spec, used, text, neighbour), expected)


def SHORT_READS(spec: CacheSpec) -> CacheSpec:
    """The spec as it reads prompts in the shapes that other modules compile."""
    return spec if spec.evictor is None else dataclasses.replace(spec, prefill="chunks")
