"""Every score against its definition, and what must hold whatever the score is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkv_jax.cache.policies.base import Evidence, Policy, QueryStatistics
from gkv_jax.cache.policies.expected_attention import EXPECTED_ATTENTION
from gkv_jax.cache.policies.h2o import H2O
from gkv_jax.cache.policies.keydiff import KEYDIFF
from gkv_jax.cache.policies.snapkv import SNAPKV
from gkv_jax.cache.policies.tova import TOVA
from gkv_jax.cache.spec import CacheSpec
from gkv_jax.models.rope_config import RopeConfig, YarnScaling
from gkv_jax.rope import Rope
from tests.gkv_jax.cache.policies import oracle
from tests.gkv_jax.cache.policies.oracle import EMPTY, Sample

ROPE = Rope(RopeConfig(theta=10_000.0), head_dim=8)
SPEC = CacheSpec(policy="snapkv", kept=1, sinks=2, window=3, pool=3)
MEAN = CacheSpec(policy="snapkv", kept=1, sinks=2, window=3, pool=5, pooling="mean")
CASES = [
    pytest.param(policy, spec, id=f"{policy.name}-{spec.pooling}")
    for policy, spec in [
        (SNAPKV, SPEC), (SNAPKV, MEAN), (H2O, SPEC), (TOVA, SPEC), (KEYDIFF, SPEC),
        (EXPECTED_ATTENTION, SPEC),
    ]
]  # fmt: skip
every_score = pytest.mark.parametrize(("policy", "spec"), CASES)
seeds = st.integers(0, 2**32 - 1)
some = settings(max_examples=12, deadline=None)

BATCH, KV_HEADS, GROUPS, SLOTS = 2, 3, 2, 16


@functools.partial(jax.jit, static_argnames=("policy", "spec", "in_order", "rope"))
def _score(
    sample: dict[str, jax.Array], policy: Policy, spec: CacheSpec, in_order: bool, rope: Rope
) -> jax.Array:
    statistics = QueryStatistics(sample.pop("mean"), sample.pop("covariance"))
    evidence = Evidence(**sample, queries=statistics, in_order=in_order, rope=rope)
    return policy.score(evidence, spec)


def score(
    sample: Sample, policy: Policy, spec: CacheSpec, in_order: bool = False, rope: Rope = ROPE
) -> np.ndarray:
    arrays = {name: jnp.asarray(value) for name, value in vars(sample).items()}
    out = _score(arrays, policy=policy, spec=spec, in_order=in_order, rope=rope)
    assert out.dtype == jnp.float32
    return np.asarray(out)


def prompts(seed: int) -> Sample:
    """Whole prompts of 0 to 16 tokens, which lie in order, then padding. Heads hold the same."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, SLOTS + 1, BATCH).astype(np.int32)
    slots = np.broadcast_to(np.arange(SLOTS, dtype=np.int32), (BATCH, KV_HEADS, SLOTS))
    return _sample(rng, np.where(slots < lengths[:, None, None], slots, EMPTY), lengths)


def caches(seed: int) -> Sample:
    """Caches after evictions: each head holds its own tokens, in any order, with gaps."""
    rng = np.random.default_rng(seed)
    next_pos = rng.choice([5, 20, 100, 20_000_000], BATCH).astype(np.int32)
    positions = np.full((BATCH, KV_HEADS, SLOTS), EMPTY, np.int32)
    for row, head in np.ndindex(BATCH, KV_HEADS):
        recent = (
            next_pos[row] - 1 - rng.permutation(min(next_pos[row], 20))[: rng.integers(0, SLOTS)]
        )
        positions[row, head, : len(recent)] = recent
        rng.shuffle(positions[row, head])
    return _sample(rng, positions, next_pos)


def _sample(rng: np.random.Generator, positions: np.ndarray, next_pos: np.ndarray) -> Sample:
    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    spread = normal(BATCH, KV_HEADS * GROUPS, 8, 8)
    return Sample(
        k=2 * normal(BATCH, KV_HEADS, SLOTS, 8),
        v=normal(BATCH, KV_HEADS, SLOTS, 8),
        positions=positions,
        next_pos=next_pos,
        attention=rng.random((BATCH, KV_HEADS, SLOTS), np.float32),
        mean=normal(BATCH, KV_HEADS * GROUPS, 8),
        covariance=spread @ spread.swapaxes(-1, -2) / 8,
    )


def assert_same(actual: np.ndarray, expected: np.ndarray, where: np.ndarray) -> None:
    np.testing.assert_allclose(actual[where], expected[where], rtol=2e-4, atol=2e-5)


@every_score
@given(seed=seeds)
@some
def test_a_prompts_scores_are_those_of_the_definition(
    policy: Policy, spec: CacheSpec, seed: int
) -> None:
    sample = prompts(seed)
    expected = oracle.scores(policy.name, sample, spec, ROPE)
    assert_same(score(sample, policy, spec, in_order=True), expected, sample.choosable(spec))


@every_score
@given(seed=seeds)
@some
def test_a_caches_scores_are_those_of_the_definition(
    policy: Policy, spec: CacheSpec, seed: int
) -> None:
    sample = caches(seed)
    expected = oracle.scores(policy.name, sample, spec, ROPE)
    assert_same(score(sample, policy, spec), expected, sample.choosable(spec))


@every_score
@given(seed=seeds)
@some
def test_the_order_of_the_slots_does_not_matter(policy: Policy, spec: CacheSpec, seed: int) -> None:
    sample = prompts(seed)
    order = np.random.default_rng(seed).permutation(SLOTS)
    moved = sample.with_slots(*(array[:, :, order] for array in sample.by_slot()))
    in_order = score(sample, policy, spec, in_order=True)
    assert_same(score(moved, policy, spec), in_order[:, :, order], moved.choosable(spec))


@every_score
@given(seed=seeds)
@some
def test_empty_slots_have_no_say(policy: Policy, spec: CacheSpec, seed: int) -> None:
    sample = caches(seed)
    empty = sample.positions == EMPTY
    garbage = sample.with_slots(
        np.where(empty[..., None], np.nan, sample.k).astype(np.float32),
        np.where(empty[..., None], np.inf, sample.v).astype(np.float32),
        sample.positions,
        np.where(empty, np.nan, sample.attention).astype(np.float32),
    )
    expected = score(sample, policy, spec)
    assert_same(score(garbage, policy, spec), expected, sample.choosable(spec))


@every_score
@given(seed=seeds)
@some
def test_rows_do_not_see_each_other(policy: Policy, spec: CacheSpec, seed: int) -> None:
    sample, other = caches(seed), caches(seed + 1)
    mixed = Sample(
        **{name: np.stack([vars(sample)[name][0], vars(other)[name][1]]) for name in vars(sample)}
    )
    expected = score(sample, policy, spec)
    actual = score(mixed, policy, spec)
    assert_same(actual[:1], expected[:1], sample.choosable(spec)[:1])


@pytest.mark.parametrize("policy", [KEYDIFF, EXPECTED_ATTENTION], ids=lambda policy: policy.name)
def test_bfloat16_keys_and_values_are_scored_in_float32(policy: Policy) -> None:
    sample = caches(1)
    k, v = (jnp.asarray(array, jnp.bfloat16) for array in (sample.k, sample.v))
    rounded = sample.with_slots(
        np.asarray(k, np.float32), np.asarray(v, np.float32), sample.positions, sample.attention
    )
    narrow = sample.with_slots(np.asarray(k), np.asarray(v), sample.positions, sample.attention)
    assert narrow.k.dtype == jnp.bfloat16
    expected = score(rounded, policy, SPEC)
    assert_same(score(narrow, policy, SPEC), expected, sample.choosable(SPEC))


@every_score
@pytest.mark.parametrize("positions", [EMPTY, None], ids=["empty rows", "zero keys"])
def test_nothing_is_nan(policy: Policy, spec: CacheSpec, positions: int | None) -> None:
    sample = prompts(3)
    held = np.full_like(sample.positions, EMPTY) if positions == EMPTY else sample.positions
    sample = sample.with_slots(
        np.zeros_like(sample.k), sample.v, held, np.zeros_like(sample.attention)
    )
    for in_order in (False, True):
        assert not np.isnan(score(sample, policy, spec, in_order)).any()


def test_expected_attention_turns_queries_as_the_model_does() -> None:
    """YaRN's attention factor, and channels that do not turn."""
    yarn = YarnScaling(4.0, original_max_position_embeddings=64, attention_factor=1.3)
    rope = Rope(RopeConfig(theta=10_000.0, scaling=yarn, partial_rotary_factor=0.5), head_dim=8)
    sample = caches(5)
    expected = oracle.scores("expected_attention", sample, SPEC, rope)
    actual = score(sample, EXPECTED_ATTENTION, SPEC, rope=rope)
    assert_same(actual, expected, sample.choosable(SPEC))


def test_tova_keeps_one_set_for_all_heads() -> None:
    sample = prompts(4)
    scores = score(sample, TOVA, SPEC, in_order=True)
    assert sample.next_pos.max() > 8
    np.testing.assert_array_equal(scores, np.broadcast_to(scores[:, :1], scores.shape))


def test_a_query_head_votes_for_its_own_kv_head_only() -> None:
    sample = prompts(4)
    expected = score(sample, EXPECTED_ATTENTION, SPEC, in_order=True)
    sample.mean[:, GROUPS : 2 * GROUPS] *= -1  # the query heads of KV head 1
    changed = score(sample, EXPECTED_ATTENTION, SPEC, in_order=True)
    np.testing.assert_array_equal(changed[:, [0, 2]], expected[:, [0, 2]])
    assert (np.abs(changed - expected)[:, 1].max(axis=-1) > 1e-3).all()


def test_votes_inside_the_window_lift_no_token_before_it() -> None:
    sample = prompts(4)
    row = int(np.argmax(sample.next_pos))
    last = int(sample.next_pos[row]) - 1
    sample.attention[row, :, last - SPEC.window + 2 :] = 100.0
    scores = score(sample, SNAPKV, SPEC, in_order=True)
    assert scores[row, :, : last - SPEC.window + 2].max() < 1.0
