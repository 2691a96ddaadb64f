"""The scores by their definitions, in NumPy and float64, one token at a time."""

import dataclasses

import numpy as np

from gkv_jax.cache.spec import CacheSpec
from gkv_jax.rope import Rope, inverse_frequencies

EMPTY = -1


@dataclasses.dataclass(frozen=True)
class Sample:
    """The arrays of an ``Evidence``, ``Hq = 2 Hk``; ``mean`` and ``covariance`` of the queries."""

    k: np.ndarray
    v: np.ndarray
    positions: np.ndarray
    next_pos: np.ndarray
    attention: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray

    def by_slot(self) -> tuple[np.ndarray, ...]:
        """The arrays ``[B,Hk,C,...]``."""
        return self.k, self.v, self.positions, self.attention

    def with_slots(
        self, k: np.ndarray, v: np.ndarray, positions: np.ndarray, a: np.ndarray
    ) -> "Sample":
        """With other arrays ``[B,Hk,C,...]``."""
        return dataclasses.replace(self, k=k, v=v, positions=positions, attention=a)

    def choosable(self, spec: CacheSpec) -> np.ndarray:
        """Which scores matter: those of tokens that are neither sinks nor in the window."""
        before_window = self.positions <= self.next_pos[:, None, None] - spec.window
        return (self.positions >= spec.sinks) & before_window


def scores(name: str, sample: Sample, spec: CacheSpec, rope: Rope) -> np.ndarray:
    """Scores ``[B,Hk,C]`` of the choosable tokens, NaN elsewhere."""
    out = np.full(sample.positions.shape, np.nan)
    for row, head, slot in zip(*np.nonzero(sample.choosable(spec)), strict=True):
        out[row, head, slot] = _SCORES[name](sample, spec, rope, row, head, slot)
    return out


def _live(sample: Sample, row: int, head: int) -> list[int]:
    """Slots of the tokens of a head, in order of position."""
    positions = sample.positions[row, head]
    return sorted(np.nonzero(positions >= 0)[0], key=lambda slot: positions[slot])


def _snapkv(sample: Sample, spec: CacheSpec, rope: Rope, row: int, head: int, slot: int) -> float:
    window_start = sample.next_pos[row] - spec.window + 1
    slots = [s for s in _live(sample, row, head) if sample.positions[row, head, s] < window_start]
    at, half = slots.index(slot), spec.pool // 2
    votes = [sample.attention[row, head, s] for s in slots[max(0, at - half) : at + half + 1]]
    return max(votes) if spec.pooling == "max" else sum(votes) / spec.pool


def _h2o(sample: Sample, spec: CacheSpec, rope: Rope, row: int, head: int, slot: int) -> float:
    queries = sample.next_pos[row] - sample.positions[row, head, slot]
    return sample.attention[row, head, slot] / queries


def _tova(sample: Sample, spec: CacheSpec, rope: Rope, row: int, head: int, slot: int) -> float:
    if len(set(sample.positions[row, :, slot])) > 1:
        return sample.attention[row, head, slot]
    return sample.attention[row, :, slot].mean()


def _keydiff(sample: Sample, spec: CacheSpec, rope: Rope, row: int, head: int, slot: int) -> float:
    keys = sample.k[row, head].astype(np.float64)
    lengths = np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-300)
    directions = keys / lengths
    anchor = directions[_live(sample, row, head)].mean(axis=0)
    return -directions[slot] @ anchor / max(np.linalg.norm(anchor), 1e-300)


def _expected_attention(
    sample: Sample, spec: CacheSpec, rope: Rope, row: int, head: int, slot: int
) -> float:
    keys = sample.k[row, head].astype(np.float64)
    dim = keys.shape[-1]
    groups = sample.mean.shape[1] // sample.positions.shape[1]
    future = sample.next_pos[row] + np.arange(512.0)
    angles = future[:, None] * inverse_frequencies(rope.config, dim)
    cos, sin = np.diag(np.cos(angles).mean(axis=0)), np.diag(np.sin(angles).mean(axis=0))
    turn, turning = np.eye(dim), 2 * len(cos)
    turn[:turning, :turning] = np.block([[cos, -sin], [sin, cos]]) * rope.attention_factor**2
    slots = [s for s in _live(sample, row, head) if sample.positions[row, head, s] >= spec.sinks]
    shares = []
    for query_head in range(head * groups, (head + 1) * groups):
        mean = turn @ sample.mean[row, query_head]
        covariance = turn @ sample.covariance[row, query_head] @ turn.T
        logits = [
            keys[s] @ mean / np.sqrt(dim) + keys[s] @ covariance @ keys[s] / (2 * dim)
            for s in slots
        ]
        weights = np.exp(logits - np.max(logits))
        shares.append(weights[slots.index(slot)] / weights.sum())
    return (np.mean(shares) + 0.02) * np.linalg.norm(sample.v[row, head, slot].astype(np.float64))


_SCORES = {
    "snapkv": _snapkv,
    "h2o": _h2o,
    "tova": _tova,
    "keydiff": _keydiff,
    "expected_attention": _expected_attention,
}
