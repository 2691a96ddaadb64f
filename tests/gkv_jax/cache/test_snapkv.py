"""SnapKV against its definition in float64, and decoding after it against the list cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax.cache import Cache, CacheSpec, init_cache
from gkv_jax.cache.policies.snapkv import SNAPKV
from gkv_jax.cache.prompt import PromptLayer, select
from gkv_jax.cache.segments import EMPTY
from gkv_jax.prefill import prefill_chunk, prefill_whole
from tests.gkv_jax.cache.test_streaming import CONFIG, MODEL, PARAMS, TEXT, inputs_for, step
from tests.gkv_jax.oracle import ListCache

SPEC = CacheSpec(policy="snapkv", sinks=3, kept=6, window=9, observe=4, pool=3, max_drafts=1)


def prefill(text: list[int], spec: CacheSpec, padded: int, row: int = 1) -> Cache:
    tokens = np.full(padded, 13, np.int32)
    tokens[: len(text)] = text
    return prefill_whole(
        PARAMS,
        init_cache(spec, MODEL, 2, jnp.float32),
        tokens,
        np.int32(row),
        np.int32(len(text)),
        model=MODEL,
        spec=spec,
    )


def selected(spec: CacheSpec, q: np.ndarray, k: np.ndarray, length: int) -> list[list[int]]:
    """What SnapKV keeps of rotated queries ``[L,Hq,D]`` and keys ``[L,Hk,D]``."""
    rotated_q, rotated_k = jnp.asarray(q)[None], jnp.asarray(k)[None]
    layer = PromptLayer(
        kind=MODEL.layers[0],
        length=jnp.int32(length),
        q=rotated_q,
        rotated_q=rotated_q,
        k=rotated_k,
        rotated_k=rotated_k,
        v=rotated_k,
        scale=q.shape[-1] ** -0.5,
        soft_cap=None,
        sinks=None,
    )
    scores = SNAPKV.score(layer.evidence(SNAPKV, spec, None), spec)
    return select(spec, scores[0], layer.length).tolist()


def decode(cache: Cache, text: list[int], start: int, spec: CacheSpec) -> np.ndarray:
    logits = []
    for at, token in enumerate(text, start):
        out, cache = step(cache, inputs_for([None, ([token], at)], spec), spec=spec)
        logits.append(np.asarray(out[1, 0]))
    return np.stack(logits)


@pytest.mark.parametrize("positions", ["cache", "text"])
@pytest.mark.parametrize("length", [12, 13, 18, 31, 32])
def test_selection_and_decoding_equal_the_list(positions: str, length: int) -> None:
    spec = dataclasses.replace(SPEC, positions=positions)
    prompt, rest = TEXT[:length], TEXT[length : length + 14]  # on past a turn of the ring
    oracle = ListCache(CONFIG, PARAMS, spec)
    oracle.read_prompt(prompt)
    oracle.snapkv(length)
    cache = prefill(prompt, spec, padded=32)

    for layer, entries in enumerate(oracle.kept):
        expected = [[e.position for e in head] for head in entries]
        actual = np.asarray(cache.layers[layer].kept_pos[1])
        assert [[p for p in head if p != EMPTY] for head in actual.tolist()] == expected
    expected_logits = np.stack([oracle.step(t, at) for at, t in enumerate(rest, length)])
    np.testing.assert_allclose(decode(cache, rest, length, spec), expected_logits, atol=3e-4)


@pytest.mark.parametrize("positions", ["cache", "text"])
def test_a_budget_for_the_whole_prompt_equals_the_full_cache(positions: str) -> None:
    spec = dataclasses.replace(SPEC, kept=40, window=6, positions=positions)
    full = CacheSpec(policy="full", sinks=0, window=64, max_drafts=1)
    prompt, rest = TEXT[:30], TEXT[30:35]  # within the window, so that nothing is evicted after
    tokens = np.asarray(prompt, np.int32)
    reference = prefill_chunk(
        PARAMS,
        init_cache(full, MODEL, 2, jnp.float32),
        tokens,
        np.int32(1),
        np.int32(0),
        np.int32(30),
        model=MODEL,
        spec=full,
    )
    cache = prefill(prompt, spec, padded=32)
    # One token: after it the bounded cache lets the oldest of the window go.
    np.testing.assert_allclose(
        decode(cache, rest[:1], 30, spec), decode(reference, rest[:1], 30, full), atol=2e-4
    )


def test_the_key_that_the_end_looks_for_is_kept() -> None:
    """One planted key per head, found wherever it is; padding and pinned tokens are never chosen."""
    rng = np.random.default_rng(0)
    spec = dataclasses.replace(SPEC, kept=2, pool=1)
    q = np.zeros((64, 4, 8), np.float32)
    k = rng.normal(0, 0.1, (64, 2, 8)).astype(np.float32)
    for length in (20, 47, 64):
        planted = rng.choice(np.arange(3, length - 9 + 1), (2, 2), replace=False)
        keys = k.copy()
        for head in range(2):
            keys[planted[head], head] += 10
            keys[[0, length - 1], head] += 20  # a sink and a window token, pinned elsewhere
        keys[length:] += 50  # padding must not matter
        queries = q.copy()
        queries[length - 4 : length] = 1
        queries[length:] = -3
        assert selected(spec, queries, keys, length) == np.sort(planted, axis=1).tolist()


def test_neighbours_of_a_key_share_its_score() -> None:
    spec = dataclasses.replace(SPEC, kept=3, pool=3)
    keys = np.zeros((40, 2, 8), np.float32)
    keys[17] = 5
    queries = np.zeros((40, 4, 8), np.float32)
    queries[36:] = 1
    assert selected(spec, queries, keys, 40) == [[16, 17, 18]] * 2


def test_prefill_memory_is_not_quadratic() -> None:
    """Attention runs in blocks of queries: doubling the prompt about doubles the temporaries."""

    def temporary(padded: int) -> int:
        shapes = jax.eval_shape(lambda: init_cache(SPEC, MODEL, 1, jnp.float32))
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        tokens = jax.ShapeDtypeStruct((padded,), jnp.int32)
        lowered = prefill_whole.lower(
            PARAMS, shapes, tokens, scalar, scalar, model=MODEL, spec=SPEC
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(4096) < 2.5 * temporary(2048)
