"""The ring against the list: same logits, whatever the chunks, the drafts and the neighbours."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkv_jax.cache import Cache, CacheSpec, init_cache, reset_row
from gkv_jax.models.llama import Llama
from gkv_jax.prefill import chunk_hidden
from gkv_jax.step import StepInputs, forward
from tests.gkv_jax.oracle import ListCache
from tests.gkv_jax.tiny import random_params, tiny_config

CONFIG = tiny_config()
MODEL = Llama(CONFIG)
PARAMS = random_params(CONFIG)
SPEC = CacheSpec(sinks=3, window=7, max_drafts=2)
SPECS = {
    "sinks and window": SPEC,
    "window alone": CacheSpec(sinks=0, window=7, max_drafts=2),
    "true positions": dataclasses.replace(SPEC, positions="text"),
    "window of one": CacheSpec(sinks=2, window=1, max_drafts=2),
    "full": CacheSpec(policy="full", sinks=0, window=64, max_drafts=2),
}
TEXT = np.random.default_rng(7).integers(0, CONFIG.vocab_size, 48).tolist()


@functools.partial(jax.jit, static_argnames=("spec",))
def step(cache: Cache, inputs: StepInputs, *, spec: CacheSpec) -> tuple[jax.Array, Cache]:
    hidden, cache, _ = forward(PARAMS, cache, inputs, model=MODEL, spec=spec)
    return MODEL.logits(PARAMS, hidden), cache


def inputs_for(rows: list[tuple[list[int], int] | None], spec: CacheSpec) -> StepInputs:
    """Rows of (tokens, position of the first), or None for an idle one."""
    tokens = np.zeros((len(rows), spec.queries), np.int32)
    for row, entry in enumerate(rows):
        if entry:
            tokens[row, : len(entry[0])] = entry[0]
    return StepInputs(
        tokens=jnp.asarray(tokens),
        n_drafts=jnp.array([len(e[0]) - 1 if e else 0 for e in rows], jnp.int32),
        active=jnp.array([e is not None for e in rows]),
        logprobs=jnp.array(False),
        go=jnp.array(True),
        next_pos=jnp.array([e[1] if e else 0 for e in rows], jnp.int32),
    )


def oracle_logits(text: list[int], spec: CacheSpec) -> np.ndarray:
    oracle = ListCache(CONFIG, PARAMS, spec)
    return np.stack([oracle.step(token, at) for at, token in enumerate(text)])


def close(actual: jax.Array, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", SPECS)
def test_one_token_at_a_time_equals_the_list(name: str) -> None:
    spec = SPECS[name]
    expected = oracle_logits(TEXT, spec)
    cache = init_cache(spec, MODEL, 1, jnp.float32)
    for at, token in enumerate(TEXT):
        logits, cache = step(cache, inputs_for([([token], at)], spec), spec=spec)
        close(logits[0, 0], expected[at])


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("size", [1, 5, 8, 32])
def test_prefill_does_not_depend_on_chunks(name: str, size: int) -> None:
    spec = SPECS[name]
    expected = oracle_logits(TEXT, spec)
    cache = init_cache(spec, MODEL, 2, jnp.float32)
    row = np.int32(1)
    for start in range(0, len(TEXT), size):
        chunk = TEXT[start : start + size]
        padded = np.zeros(size + 2, np.int32)  # always some padding
        padded[: len(chunk)] = chunk
        hidden, cache = chunk_hidden(
            PARAMS,
            cache,
            padded,
            row,
            np.int32(start),
            np.int32(len(chunk)),
            model=MODEL,
            spec=spec,
        )
        close(MODEL.logits(PARAMS, hidden[: len(chunk)]), expected[start : start + len(chunk)])
    # And decoding goes on from there, the other row idle.
    token = 5
    logits, _ = step(cache, inputs_for([None, ([token], len(TEXT))], spec), spec=spec)
    close(logits[1, 0], oracle_logits([*TEXT, token], spec)[-1])


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(sorted(SPECS)))
def test_rejected_drafts_leave_no_trace(seed: int, name: str) -> None:
    """Random drafts, of which random prefixes are right, in two rows at different phases."""
    spec, rng = SPECS[name], np.random.default_rng(seed)
    expected = oracle_logits(TEXT, spec)
    cache = init_cache(spec, MODEL, 2, jnp.float32)
    at = [0, 0]
    while min(at) < len(TEXT) - spec.queries:
        rows: list[tuple[list[int], int] | None] = []
        right = []
        for row in range(2):
            if at[row] >= len(TEXT) - spec.queries or rng.random() < 0.2:
                rows.append(None)
                right.append(0)
                continue
            drafts = int(rng.integers(0, spec.max_drafts + 1))
            good = int(rng.integers(0, drafts + 1))
            wrong = rng.integers(0, CONFIG.vocab_size, drafts - good).tolist()
            rows.append((TEXT[at[row] : at[row] + 1 + good] + wrong, at[row]))
            right.append(1 + good)
        logits, cache = step(cache, inputs_for(rows, spec), spec=spec)
        for row, count in enumerate(right):
            close(logits[row, :count], expected[at[row] : at[row] + count])
            at[row] += count


def test_a_row_does_not_know_its_neighbours() -> None:
    """A ragged batch of eight, each row as if alone, in slots that were used before."""
    rng = np.random.default_rng(3)
    cache = init_cache(SPEC, MODEL, 8, jnp.float32)
    for _ in range(2):
        texts = [
            rng.integers(0, CONFIG.vocab_size, n).tolist() for n in (1, 2, 3, 4, 9, 10, 11, 25)
        ]
        rng.shuffle(texts)
        for row in range(8):
            cache = reset_row(cache, np.int32(row), spec=SPEC, model=MODEL)
        expected = [oracle_logits(text, SPEC) for text in texts]
        for at in range(max(map(len, texts))):
            rows = [([text[at]], at) if at < len(text) else None for text in texts]
            logits, cache = step(cache, inputs_for(rows, SPEC), spec=SPEC)
            for row, text in enumerate(texts):
                if at < len(text):
                    close(logits[row, 0], expected[row][at])


def test_a_query_that_sees_nothing_is_zero_not_nan() -> None:
    cache = init_cache(SPEC, MODEL, 2, jnp.float32)
    logits, _ = step(cache, inputs_for([None, ([1], 0)], SPEC), spec=SPEC)
    assert np.isfinite(np.asarray(logits)).all()


def test_bytes_do_not_depend_on_the_text() -> None:
    before = init_cache(SPEC, MODEL, 1, jnp.float32)
    cache, size = before, before.nbytes
    for at in (0, 500, 50_000, 16_777_216):
        _, cache = step(cache, inputs_for([([1], at)], SPEC), spec=SPEC)
        assert cache.nbytes == size
    assert size == sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(init_cache(SPEC, MODEL, 1, jnp.float32))
    )
