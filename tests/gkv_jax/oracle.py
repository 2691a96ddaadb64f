"""A Llama with a list for a cache, in NumPy float64: slow, obvious, and independent of gkv_jax.cache.

Keys are kept before rotation and rotated on every read, at the rank they have then. That is
StreamingLLM as its paper defines it, and what the ring with its two query rotations must equal.
"""

import dataclasses
from typing import Any

import numpy as np

from gkv_jax.cache import CacheSpec
from gkv_jax.models.config import ModelConfig
from gkv_jax.rope import inverse_frequencies


@dataclasses.dataclass
class Entry:
    position: int
    k: np.ndarray  # [Hk,D], before rotation
    v: np.ndarray  # [Hk,D]


class ListCache:
    """One text through the model, token by token. ``step`` returns logits ``[V]``."""

    def __init__(self, config: ModelConfig, params: Any, spec: CacheSpec) -> None:
        self.config, self.spec = config, spec
        self.params = _float64(params)
        self.inv_freq = inverse_frequencies(config.rope, config.head_dim)
        self.entries: list[list[Entry]] = [[] for _ in range(config.num_layers)]
        # Per layer and KV head, the entries that SnapKV kept; None before it ran.
        self.kept: list[list[list[Entry]]] | None = None
        self.ring_start = spec.sinks

    def step(self, token: int, position: int) -> np.ndarray:
        p, eps = self.params, self.config.rms_norm_eps
        x = p["embed"][token]
        for index, layer in enumerate(p["layers"]):
            h = _norm(x, layer["attn_norm"], eps)
            q, k, v = (
                _linear(layer, n, h).reshape(-1, self.config.head_dim) for n in ("q", "k", "v")
            )
            self.entries[index].append(Entry(position, k, v))
            x = x + _linear(layer, "o", self._attend(index, q, position).reshape(-1))
            h = _norm(x, layer["mlp_norm"], eps)
            gate = _linear(layer, "gate", h)
            x = x + _linear(layer, "down", gate / (1 + np.exp(-gate)) * _linear(layer, "up", h))
        head = p["embed" if self.config.tie_word_embeddings else "head"]
        return head @ _norm(x, p["norm"], eps)

    def truncate(self, position: int) -> None:
        """Forget everything at ``position`` and after."""
        for layer in range(len(self.entries)):
            self.entries[layer] = [e for e in self.entries[layer] if e.position < position]

    def visible(self, layer: int, head: int, position: int) -> list[Entry]:
        """What KV head ``head`` shows a query at ``position``, in order of rank."""
        spec, entries = self.spec, self.entries[layer]
        sinks = [e for e in entries if e.position < spec.sinks]
        kept = self.kept[layer][head] if self.kept is not None else []
        recent = [
            e
            for e in entries
            if e.position >= self.ring_start and e.position > position - spec.window
        ]
        return sinks + kept + recent

    def _attend(self, layer: int, q: np.ndarray, position: int) -> np.ndarray:
        groups = self.config.num_heads // self.config.num_kv_heads
        out = np.zeros_like(q)
        for head in range(self.config.num_heads):
            seen = self.visible(layer, head // groups, position)
            by_rank = self.spec.by_rank
            places = list(range(len(seen))) if by_rank else [e.position for e in seen]
            keys = np.stack(
                [self.rotate(e.k[head // groups], at) for e, at in zip(seen, places, strict=True)]
            )
            logits = keys @ self.rotate(q[head], places[-1]) / np.sqrt(q.shape[-1])
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            out[head] = weights @ np.stack([e.v[head // groups] for e in seen])
        return out

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        angle, half = position * self.inv_freq, x.shape[-1] // 2
        a, b, c, s = x[..., :half], x[..., half:], np.cos(angle), np.sin(angle)
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    def snapkv(self, length: int) -> None:
        """Compress the first ``length`` tokens, which must have been read with nothing evicted."""
        spec, groups = self.spec, self.config.num_heads // self.config.num_kv_heads
        self.ring_start = length - spec.window + 1
        self.kept = []
        for layer, entries in enumerate(self.entries):
            queries = self.prompt_queries[layer]
            self.kept.append([])
            for head in range(self.config.num_kv_heads):
                keys = np.stack([self.rotate(e.k[head], e.position) for e in entries])
                votes = []
                for at in range(max(0, length - spec.observe), length):
                    for q in queries[at][head * groups : (head + 1) * groups]:
                        logits = keys[: at + 1] @ self.rotate(q, at) / np.sqrt(q.shape[-1])
                        weights = np.exp(logits - logits.max())
                        votes.append(np.pad(weights / weights.sum(), (0, length - at - 1)))
                score = np.mean(votes, axis=0)
                half = spec.pool // 2
                score = score[: self.ring_start]  # the window has no say
                pooled = [score[max(0, j - half) : j + half + 1].max() for j in range(len(score))]
                candidates = range(spec.sinks, self.ring_start)
                best = sorted(candidates, key=lambda j: (-pooled[j], j))[: spec.kept]
                self.kept[layer].append([entries[j] for j in sorted(best)])

    def read_prompt(self, tokens: list[int]) -> None:
        """Read with full attention at true positions, remembering the queries for ``snapkv``."""
        full = CacheSpec.full(10**6)
        self.prompt_queries: list[list[np.ndarray]] = [[] for _ in self.entries]
        spec, self.spec, ring_start, self.ring_start = self.spec, full, self.ring_start, 0
        attend = self._attend

        def recording(layer: int, q: np.ndarray, position: int) -> np.ndarray:
            self.prompt_queries[layer].append(q)
            return attend(layer, q, position)

        self._attend = recording  # type: ignore[method-assign]
        for position, token in enumerate(tokens):
            self.step(token, position)
        self._attend = attend  # type: ignore[method-assign]
        self.spec, self.ring_start = spec, ring_start


def _float64(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _float64(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_float64(value) for value in tree]
    return np.asarray(tree, np.float64)


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * x / np.sqrt(np.mean(x * x) + eps)


def _linear(layer: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ layer[name] + layer.get(f"{name}_bias", 0.0)
