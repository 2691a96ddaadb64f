"""What must hold of every cache, drawn at random. Each oracle has one home, here or beside its subject:

============================================  =======================================================
the ring equals a list                        ``test_streaming``, ``test_snapkv``, ``test_evict``,
                                              ``test_mixed``; chunks and steps mixed at random, here
chunks do not matter                          ``test_streaming``, ``test_evict``, ``test_mixed``; here
a dense masked run with ranks per query       here
rejected drafts leave no trace                ``test_streaming``, ``test_evict``, ``test_quest``,
                                              ``test_mixed``
a row alone equals the row in a batch         ``test_streaming``; here bit by bit, with policies
a used row equals a fresh one                 here, bit by bit, with policies
the phase of the ring does not matter         here
places for a whole prompt equal a full cache  here, under every score policy
padding has no say                            here, under every score policy
all pages equal a full cache                  ``test_quest``
a learned sink of minus infinity is none      here, through all three forms of attention
attention received sums up to the queries     ``test_evict``; here with rejected drafts
the window counts its own token               here
a window of the layer's own                   ``test_mixed``
ties, NaN and infinity among scores           here
a score equals its definition                 ``policies/test_scores``
bytes do not depend on the text               ``test_streaming``, ``test_report``; here from the shapes
one program for all positions                 here
a million tokens                              ``test_long_stream``
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
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gkv_jax.cache import Cache, CacheSpec, Evidence, Policy, init_cache, reset_row
from gkv_jax.cache.prompt import select
from gkv_jax.models.llama import Llama
from gkv_jax.models.protocol import Attend, Params
from gkv_jax.prefill import chunk_hidden, prefill_whole, read_prompt
from gkv_jax.rope import inverse_frequencies
from gkv_jax.step import StepInputs, forward
from tests.gkv_jax.cache import test_evict, test_streaming
from tests.gkv_jax.cache.test_streaming import CONFIG, MODEL, PARAMS, SPEC, TEXT, close, inputs_for
from tests.gkv_jax.tiny import random_params, tiny_config

seeds = st.integers(0, 2**32 - 1)


def some(examples: int) -> settings:
    phases = (Phase.explicit, Phase.generate)  # no seed is simpler than another
    return settings(max_examples=examples, deadline=None, derandomize=True, phases=phases)


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
    hidden, cache = chunk_hidden(
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
    """Of any size, at any phase of the ring. Drafts of which some are wrong are followed by a step."""
    spec, rng, expected = (
        test_streaming.SPECS[name],
        np.random.default_rng(seed),
        expected_logits(name),
    )
    cache, at, wrong = init_cache(spec, MODEL, 2, jnp.float32), 0, 0
    while at < len(TEXT):
        left = len(TEXT) - at
        if rng.random() < 0.5:
            count = min(int(rng.integers(1, 8)), left)
            logits, cache = read_chunk(cache, TEXT[at : at + count], at, spec)
        else:
            count = min(int(rng.integers(1, spec.queries + 1)), left)
            wrong = int(rng.integers(0, spec.queries - count + 1))
            tokens = TEXT[at : at + count] + random_text(rng, wrong)
            rows = inputs_for([None, (tokens, at)], spec)
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
    rank = seen.cumsum(axis=1) - 1 if spec.by_rank else np.tile(at, (len(at), 1))
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
        changed = [
            *text[:position],
            (text[position] + 1) % CONFIG.vocab_size,
            *text[position + 1 :],
        ]
        is_seen = position < SPEC.sinks or position > last - SPEC.window
        assert (np.abs(final(changed) - reference).max() > 1e-4) == is_seen
        assert is_seen or (final(changed) == reference).all()


# --- Rows of a batch, under every policy ---

CHOOSING = ["h2o every 4", "snapkv every 8", "keydiff every 4"]
"""One for each kind of evidence."""


def in_chunks(spec: CacheSpec, cache: Cache, text: list[int]) -> Cache:
    """The cache with a text in row 1, read as it is decoded."""
    chunks = spec if spec.evictor is None else dataclasses.replace(spec, prefill="chunks")
    return read_prompt(PARAMS, cache, text, 1, model=MODEL, spec=chunks)


def run_row(
    spec: CacheSpec,
    cache: Cache,
    text: list[int],
    prompt: int,
    neighbour: list[int],
    rng: np.random.Generator | None,
) -> np.ndarray:
    """Logits of ``text`` in row 1, after a prompt of so many of its tokens.

    Two tokens a step, where they fit; row 0 is idle, or reads ``neighbour`` at times.
    """
    cache = in_chunks(spec, cache, text[:prompt])
    out, at, other = [], prompt, 0
    while at < len(text):
        count = min(1 + spec.room_for_drafts(at), 2, len(text) - at)
        rows: list[tuple[list[int], int] | None] = [None, (text[at : at + count], at)]
        if rng is not None and rng.random() < 0.7:
            rows[0] = ([neighbour[other]], other)
            other += 1
        counts = jnp.array([int(rows[0] is not None), count], jnp.int32)
        logits, cache = test_evict.step(cache, inputs_for(rows, spec), counts, spec=spec)
        out.append(np.asarray(logits[1, :count]))
        at += count
    return np.concatenate(out)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["window", *CHOOSING])
@some(3)
@given(seed=seeds)
def test_a_row_knows_neither_neighbours_nor_predecessors(name: str, seed: int) -> None:
    """Bit by bit: alone in a new cache, or beside others where texts and garbage were before."""
    spec = SPEC if name == "window" else test_evict.SPECS[name]
    rng = np.random.default_rng(seed)
    text, before, neighbour = (random_text(rng, n) for n in (32, int(rng.integers(1, 33)), 32))
    prompt = int(rng.integers(0, 12))
    new = init_cache(spec, MODEL, 2, jnp.float32)

    def garbage(leaf: jax.Array) -> jax.Array:
        return jnp.full_like(leaf, 1e30) if leaf.dtype == jnp.float32 else leaf.copy()

    used = in_chunks(spec, jax.tree.map(garbage, new), before)
    for row in range(2):
        used = reset_row(used, np.int32(row), spec=spec, model=MODEL)
    expected = run_row(spec, new, text, prompt, neighbour, None)
    np.testing.assert_array_equal(run_row(spec, used, text, prompt, neighbour, rng), expected)


@some(4)
@given(seed=seeds)
def test_attention_received_is_what_the_accepted_queries_gave(seed: int) -> None:
    """While nothing is evicted, each has given 1 to its KV head; rejected drafts have given nothing."""
    spec, rng = (
        dataclasses.replace(test_evict.SPECS["h2o every 4"], window=40),
        np.random.default_rng(seed),
    )
    cache, at = init_cache(spec, MODEL, 2, jnp.float32), 0
    while at < 30:
        drafts = int(rng.integers(0, spec.room_for_drafts(at) + 1))
        right = 1 + int(rng.integers(0, drafts + 1))
        rows = inputs_for([None, (random_text(rng, 1 + drafts), at)], spec)
        _, cache = test_evict.step(cache, rows, jnp.array([0, right], jnp.int32), spec=spec)
        at += right
        for layer in cache.layers:
            np.testing.assert_allclose(np.asarray(layer.mass[1]).sum(axis=-1), at, rtol=1e-5)


# --- Choosing from a prompt, under every score policy ---

SELECTING = {
    name: CacheSpec(
        policy=name, decode="stream", sinks=2, kept=24, window=6, observe=4, pool=3, max_drafts=1
    )
    for name in ("snapkv", "h2o", "tova", "keydiff", "expected_attention")
}
"""In decoding all are alike, and one program serves them."""
BUCKET = 64
WHOLE = 31
"""The longest prompt that their places hold: one less than a bucket of its own."""


def select_from(name: str, tokens: list[int], padding: list[int]) -> Cache:
    padded = np.asarray(tokens + padding, np.int32)[:BUCKET]
    spec = SELECTING[name]
    cache = init_cache(spec, MODEL, 2, jnp.float32)
    length = np.int32(len(tokens))
    return prefill_whole(PARAMS, cache, padded, np.int32(1), length, model=MODEL, spec=spec)


@functools.cache
def full_logits() -> np.ndarray:
    return test_streaming.oracle_logits(TEXT, CacheSpec.full(64))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", SELECTING)
def test_places_for_the_whole_prompt_equal_a_full_cache(name: str) -> None:
    spec = SELECTING["snapkv"]
    for length in (8, 19, WHOLE - 1, WHOLE):
        cache = select_from(name, TEXT[:length], [0] * BUCKET)
        # One token: after it, the oldest of the window leaves.
        rows = inputs_for([None, ([TEXT[length]], length)], spec)
        logits, _ = test_streaming.step(cache, rows, spec=spec)
        close(logits[1, 0], full_logits()[length])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", SELECTING)
@some(4)
@given(seed=seeds)
def test_padding_has_no_say(name: str, seed: int) -> None:
    """Whatever its tokens are, every bit of the row stays, and only what is real is kept."""
    rng = np.random.default_rng(seed)
    for length in (WHOLE, WHOLE + 1, WHOLE + 2, BUCKET - 1, BUCKET, int(rng.integers(9, BUCKET))):
        text = random_text(rng, length)
        one, other = (select_from(name, text, random_text(rng, BUCKET)) for _ in range(2))
        jax.tree.map(np.testing.assert_array_equal, one, other)
        spec = SELECTING[name]
        for layer in one.layers:
            for head in np.asarray(layer.kept_pos[1]):
                chosen = head[head >= 0]
                assert len(chosen) == min(length - spec.sinks - spec.window + 1, spec.kept)
                assert (np.diff(chosen) > 0).all()
                assert chosen.min() >= spec.sinks
                assert chosen.max() <= length - spec.window


@some(60)
@given(
    scores=st.lists(
        st.sampled_from([0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 3e38, -3e38, 0.5]),
        min_size=32,
        max_size=32,
    ),
    length=st.integers(12, 32),
)
def test_ties_and_scores_that_are_no_numbers(scores: list[float], length: int) -> None:
    """Sinks and window are never chosen from; NaN is worst; among equals, the earlier is kept."""
    spec = CacheSpec(policy="snapkv", sinks=3, kept=5, window=6)
    lowest = float(np.finfo(np.float32).min)
    chosen = select(spec, jnp.asarray([scores], jnp.float32), jnp.int32(length))
    comparable = np.nan_to_num(np.float32(scores), nan=lowest, posinf=-lowest, neginf=lowest)
    candidates = sorted(range(3, length - 5), key=lambda at: (-comparable[at], at))[:5]
    expected = sorted(candidates) + [-1] * (5 - len(candidates))
    assert chosen.tolist() == [expected]


def _every_other(evidence: Evidence, spec: CacheSpec) -> jax.Array:
    return jnp.where(evidence.positions % 2 == 0, 1.0, jnp.nan).astype(jnp.float32)


def test_ties_in_decoding_keep_the_older() -> None:
    """A policy to which even tokens are all the same, and odd ones no number."""
    policy = Policy("every other", _every_other, needs="keys", in_decode=True)
    spec = CacheSpec(policy=policy, sinks=2, kept=4, window=5)
    cache = init_cache(spec, MODEL, 2, jnp.float32)
    for at, token in enumerate(TEXT[:24]):
        _, cache = test_evict.one(cache, token, at, spec)
        if at == 10:
            for kept in test_evict.kept_positions(cache, 0, 1, spec):
                assert {2, 4, 6} < set(kept)
    assert test_evict.kept_positions(cache, 0, 1, spec) == [[2, 4, 6, 8]] * 2


# --- Learned sinks ---


@dataclasses.dataclass(frozen=True)
class SinkLlama(Llama):
    """A Llama with learned sinks, ``params["sinks"]`` float32 ``[Hq]``, the same in all layers."""

    def hidden(self, params: Params, tokens: jax.Array, attend: Attend) -> jax.Array:
        def with_sinks(*operands: Any, **options: Any) -> jax.Array:
            return attend(*operands, sinks=params["sinks"], **options)

        return super().hidden(params, tokens, with_sinks)


SINKING = SinkLlama(CONFIG)


def with_sinks(value: float) -> Params:
    return PARAMS | {"sinks": jnp.full((CONFIG.num_heads,), value, jnp.float32)}


@jax.jit
def sinking_step(params: Params, cache: Cache, inputs: StepInputs) -> tuple[jax.Array, Cache]:
    hidden, cache, _ = forward(params, cache, inputs, model=SINKING, spec=SPEC)
    return SINKING.logits(params, hidden), cache


def by_steps(params: Params) -> np.ndarray:
    cache, out = init_cache(SPEC, SINKING, 2, jnp.float32), []
    for at in range(0, 24, 3):
        rows = inputs_for([None, (TEXT[at : at + 3], at)], SPEC)
        logits, cache = sinking_step(params, cache, rows)
        out.append(np.asarray(logits[1]))
    return np.concatenate(out)


def by_chunks(params: Params) -> np.ndarray:
    cache, out = init_cache(SPEC, SINKING, 2, jnp.float32), []
    for at in range(0, 24, 6):
        logits, cache = read_chunk(cache, TEXT[at : at + 6], at, model=SINKING, params=params)
        out.append(logits)
    return np.concatenate(out)


def after_prompt(model: Llama, params: Params) -> Cache:
    """Of a prompt that the policy must choose from, in row 1."""
    return prefill_whole(
        params,
        init_cache(SELECTING["snapkv"], model, 2, jnp.float32),
        np.asarray(TEXT + [0] * (BUCKET - len(TEXT)), np.int32),
        np.int32(1),
        np.int32(len(TEXT)),
        model=model,
        spec=SELECTING["snapkv"],
    )


@pytest.mark.parametrize("read", [by_steps, by_chunks], ids=lambda read: read.__name__)
def test_a_learned_sink_of_minus_infinity_is_none(read: Callable[..., np.ndarray]) -> None:
    plain = expected_logits("sinks and window")[:24]
    close(read(with_sinks(-np.inf)), plain)
    assert np.abs(read(with_sinks(0.0)) - plain).max() > 0.1


def test_a_learned_sink_of_minus_infinity_is_none_to_a_policy_either() -> None:
    plain = after_prompt(MODEL, PARAMS)
    for value, is_none in ((-np.inf, True), (0.0, False)):
        cache = after_prompt(SINKING, with_sinks(value))
        same = [
            np.allclose(new.v.data, old.v.data, atol=1e-5) and (new.kept_pos == old.kept_pos).all()
            for new, old in zip(cache.layers, plain.layers, strict=True)
        ]
        assert same[-1] == is_none


def test_learned_sinks_are_the_same_in_steps_and_chunks() -> None:
    params = with_sinks(0.7)
    np.testing.assert_allclose(by_steps(params), by_chunks(params), atol=2e-5)
    # A sink that takes all the attention leaves each token alone: equal ones have equal logits.
    alone, token = by_steps(with_sinks(1e4)), max(TEXT[:24], key=TEXT[:24].count)
    same = alone[[at for at in range(24) if TEXT[at] == token]]
    assert len(same) > 1
    np.testing.assert_allclose(same, np.broadcast_to(same[0], same.shape), atol=1e-5)


# --- Size and programs ---


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        dataclasses.replace(SPEC, dtype="int8"),
        SELECTING["snapkv"],
        dataclasses.replace(test_evict.SPECS["h2o every 4"], dtype="bfloat16"),
        test_evict.SPECS["snapkv every 8"],
        CacheSpec(policy="quest", sinks=4, window=44, page=4, budget=16),
    ],
    ids=lambda spec: f"{spec.policy_name}-{spec.dtype}",
)
def test_shapes_do_not_depend_on_the_text(spec: CacheSpec) -> None:
    """Neither a step nor a choice nor a chunk changes one; keys and values are per KV head."""
    cache = jax.eval_shape(lambda: init_cache(spec, MODEL, 2, jnp.float32))
    inputs = inputs_for([([1], 0), ([1], 5)], spec)
    counts = jnp.array([1, 1], jnp.int32)

    def stepped(cache: Cache) -> Cache:
        _, cache, pending = forward(PARAMS, cache, inputs, model=MODEL, spec=spec)
        at = inputs.next_pos
        return test_evict.commit(cache, pending, at, at + counts, model=MODEL, spec=spec)

    def chunked(cache: Cache) -> Cache:
        scalar = jnp.int32(1)
        tokens = jnp.zeros(7, jnp.int32)
        at = scalar, scalar, scalar
        return chunk_hidden(PARAMS, cache, tokens, *at, model=MODEL, spec=spec)[1]

    for after in (stepped, chunked):
        assert jax.eval_shape(after, cache) == cache
    for layer in cache.layers:
        for stored in (layer.k, layer.v):
            assert stored.data.shape[:2] == (2, CONFIG.num_kv_heads)


def test_one_program_serves_all_positions(compiles: list[str]) -> None:
    cache = init_cache(SPEC, MODEL, 2, jnp.float32)
    for first, at in enumerate((0, 3, 9, 10, 50_000, 2**31 - 10)):
        if first == 1:
            compiles.clear()
        _, cache = read_chunk(cache, TEXT[: 1 + first], at)
        rows = inputs_for([None, (TEXT[:2], at + 1 + first)], SPEC)
        _, cache = test_streaming.step(cache, rows, spec=SPEC)
    assert not {"step", "chunk_hidden"} & set(compiles)
