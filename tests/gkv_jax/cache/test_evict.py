"""Policies that choose while decoding against the list: chunks, drafts, neighbours, whole prompts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax.cache import Cache, CacheSpec, Evidence, Policy, commit, init_cache, reset_row
from gkv_jax.prefill import read_prompt
from gkv_jax.step import StepInputs, forward
from tests.gkv_jax.cache.evicting import EvictingList
from tests.gkv_jax.cache.test_streaming import CONFIG, MODEL, PARAMS, TEXT, close, inputs_for

SPECS = {
    "h2o": CacheSpec(policy="h2o", sinks=2, kept=5, window=6),
    "tova": CacheSpec(policy="tova", sinks=2, kept=5, window=6),
    "h2o every 4": CacheSpec(policy="h2o", sinks=2, kept=5, window=6, interval=4, max_drafts=3),
    "tova every 4": CacheSpec(policy="tova", sinks=2, kept=5, window=6, interval=4, max_drafts=3),
    "snapkv every 8": CacheSpec(
        policy="snapkv", decode="snapkv", sinks=2, kept=6, window=7, interval=8, max_drafts=3,
        observe=4, pool=3,
    ),
    "keydiff every 4": CacheSpec(
        policy="keydiff", decode="keydiff", sinks=1, kept=3, window=5, interval=4, max_drafts=3
    ),
    "more waiting than kept": CacheSpec(
        policy="h2o", sinks=0, kept=2, window=1, interval=5, max_drafts=1
    ),
}  # fmt: skip
DRAFTING = [name for name, spec in SPECS.items() if spec.max_drafts]


@functools.partial(jax.jit, static_argnames=("spec",))
def step(
    cache: Cache, inputs: StepInputs, n_new: jax.Array, *, spec: CacheSpec
) -> tuple[jax.Array, Cache]:
    """Logits of a step of which the first ``n_new [B]`` tokens count, and the cache after it."""
    hidden, cache, pending = forward(PARAMS, cache, inputs, model=MODEL, spec=spec)
    after = inputs.next_pos + n_new
    cache = commit(cache, pending, inputs.next_pos, after, model=MODEL, spec=spec)
    return MODEL.logits(PARAMS, hidden), cache


def one(cache: Cache, token: int, at: int, spec: CacheSpec) -> tuple[np.ndarray, Cache]:
    """A step of one token in row 1 of two, the other idle."""
    rows = inputs_for([None, ([token], at)], spec)
    logits, cache = step(cache, rows, jnp.array([0, 1], jnp.int32), spec=spec)
    return np.asarray(logits[1, 0]), cache


@functools.cache
def expected_logits(name: str) -> np.ndarray:
    oracle = EvictingList(CONFIG, PARAMS, SPECS[name])
    return np.stack([oracle.step(token, at) for at, token in enumerate(TEXT)])


def kept_positions(cache: Cache, layer: int, row: int, spec: CacheSpec) -> list[list[int]]:
    count = int(cache.slots[0].prefix_len[row]) - spec.sinks
    heads = np.asarray(cache.layers[layer].kept_pos[row])[:, :count]
    return np.sort(heads, axis=1).tolist()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", SPECS)
def test_one_token_at_a_time_equals_the_list(name: str) -> None:
    spec, oracle = SPECS[name], EvictingList(CONFIG, PARAMS, SPECS[name])
    cache = init_cache(spec, MODEL, 2, jnp.float32)
    for at, token in enumerate(TEXT):
        logits, cache = one(cache, token, at, spec)
        close(logits, oracle.step(token, at))
    for layer, lists in enumerate(oracle.kept):
        kept = [[e.position for e in entries] for entries in lists]
        assert kept_positions(cache, layer, 1, spec) == kept


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("length", [1, 11, 24, 41])
def test_a_prompt_in_chunks_equals_decoding_it(name: str, length: int) -> None:
    """Chunks end where choices fall; row 1 is used a second time, after another text."""
    spec = dataclasses.replace(SPECS[name], prefill="chunks")
    cache = init_cache(spec, MODEL, 2, jnp.float32)
    for text in (TEXT[::-1], TEXT[:length]):
        cache = reset_row(cache, np.int32(1), spec=spec, model=MODEL)
        cache = read_prompt(PARAMS, cache, text, 1, model=MODEL, spec=spec)
    for at in range(length, len(TEXT)):
        logits, cache = one(cache, TEXT[at], at, spec)
        close(logits, expected_logits(name)[at])


@pytest.mark.parametrize("name", DRAFTING)
@pytest.mark.parametrize("seed", range(4))
def test_rejected_drafts_leave_no_trace(name: str, seed: int) -> None:
    """Random drafts up to the next choice, of which random prefixes are right, in two rows."""
    spec, rng = SPECS[name], np.random.default_rng(seed)
    expected = expected_logits(name)
    cache, at = init_cache(spec, MODEL, 2, jnp.float32), [0, 0]
    while min(at) < len(TEXT):
        rows: list[tuple[list[int], int] | None] = []
        right = []
        for row in range(2):
            if at[row] >= len(TEXT) or rng.random() < 0.2:
                rows.append(None)
                right.append(0)
                continue
            room = min(spec.room_for_drafts(at[row]), len(TEXT) - 1 - at[row])
            drafts = int(rng.integers(0, room + 1))
            good = int(rng.integers(0, drafts + 1))
            wrong = rng.integers(0, CONFIG.vocab_size, drafts - good).tolist()
            rows.append((TEXT[at[row] : at[row] + 1 + good] + wrong, at[row]))
            right.append(1 + good)
        logits, cache = step(cache, inputs_for(rows, spec), jnp.array(right, jnp.int32), spec=spec)
        for row, count in enumerate(right):
            close(logits[row, :count], expected[at[row] : at[row] + count])
            at[row] += count


@pytest.mark.parametrize("name", ["h2o", "snapkv every 8"])
def test_a_short_whole_prompt_equals_decoding_it(name: str) -> None:
    """Nothing has left the window yet, but the policy's memory of the prompt must be right."""
    spec = SPECS[name]
    length = spec.sinks + spec.window - 1
    cache = init_cache(spec, MODEL, 2, jnp.float32)
    cache = read_prompt(PARAMS, cache, TEXT[:length], 1, model=MODEL, spec=spec)
    for at in range(length, len(TEXT)):
        logits, cache = one(cache, TEXT[at], at, spec)
        close(logits, expected_logits(name)[at])


@pytest.mark.parametrize("name", ["h2o", "tova", "snapkv every 8", "keydiff every 4"])
@pytest.mark.parametrize("length", [17, 32])
def test_a_long_whole_prompt_is_chosen_from_at_once(name: str, length: int) -> None:
    """Full attention over the prompt, one choice from all of it, then as ever."""
    spec = SPECS[name]
    oracle = EvictingList(CONFIG, PARAMS, dataclasses.replace(spec, interval=10**6))
    for at, token in enumerate(TEXT[:length]):
        oracle.step(token, at)
    oracle.choose(length)
    oracle.spec = spec
    cache = init_cache(spec, MODEL, 2, jnp.float32)
    cache = read_prompt(PARAMS, cache, TEXT[:length], 1, model=MODEL, spec=spec)
    for at in range(length, len(TEXT)):
        logits, cache = one(cache, TEXT[at], at, spec)
        close(logits, oracle.step(TEXT[at], at))


def test_int8_shows_policies_the_units_of_the_text() -> None:
    """Stored keys are measured in channels of the text: what policies see of them must not be."""
    seen: dict[str | None, tuple[np.ndarray, np.ndarray]] = {}

    def key_length(evidence: Evidence, spec: CacheSpec) -> jax.Array:
        def note(k: jax.Array, positions: jax.Array) -> None:
            seen[spec.dtype] = np.asarray(k), np.asarray(positions)

        jax.debug.callback(note, evidence.k, evidence.positions, ordered=True)
        return jnp.linalg.norm(evidence.k, axis=-1)

    longest = Policy("longest keys", key_length, needs="window_attention")
    exact = CacheSpec(
        policy=longest, decode=longest, sinks=2, kept=6, window=7, interval=8, observe=4
    )
    caches = []
    for spec in (exact, dataclasses.replace(exact, dtype="int8")):
        cache = init_cache(spec, MODEL, 2, jnp.float32)
        cache = read_prompt(PARAMS, cache, TEXT[:23], 1, model=MODEL, spec=spec)
        caches.append(jax.tree.map(np.asarray, cache.layers[0]))
        _, cache = one(cache, TEXT[23], 23, spec)
    jax.effects_barrier()
    (k, positions), (near, same) = seen[None], seen["int8"]
    live = positions[1] >= 0
    assert live.any()
    assert (positions[1] == same[1]).all()
    np.testing.assert_allclose(near[1][live], k[1][live], atol=0.2)
    queries, channel = caches[0].observed[1], caches[1].channel[1]
    in_channels = queries * np.repeat(channel, 2, axis=0)[None]
    np.testing.assert_allclose(caches[1].observed[1], in_channels, rtol=1e-5)


def test_a_row_in_int8_is_emptied_of_its_channels() -> None:
    """A prompt of one token sets none: it must not meet those of the text before."""
    spec = CacheSpec(sinks=2, window=24, dtype="int8")
    cache = init_cache(spec, MODEL, 2, jnp.float32)
    cache = read_prompt(PARAMS, cache, TEXT, 1, model=MODEL, spec=spec)
    assert (np.asarray(cache.layers[0].channel[1]) != 1).any()
    cache = reset_row(cache, np.int32(1), spec=spec, model=MODEL)
    assert (np.asarray(cache.layers[0].channel) == 1).all()


def test_mass_is_what_the_queries_had_to_give() -> None:
    """While nothing is evicted, every query has given 1 per KV head."""
    spec = dataclasses.replace(SPECS["h2o every 4"], window=40)
    cache = init_cache(spec, MODEL, 2, jnp.float32)
    cache = read_prompt(PARAMS, cache, TEXT[:20], 1, model=MODEL, spec=spec)
    for at in range(20, 30):
        _, cache = one(cache, TEXT[at], at, spec)
    for layer in cache.layers:
        np.testing.assert_allclose(np.asarray(layer.mass[1]).sum(axis=-1), 30, rtol=1e-5)
