"""The list cache under policies that choose while decoding: float64, one token at a time."""

from typing import Any

import numpy as np

from gkv_jax.cache import CacheSpec
from gkv_jax.models.config import ModelConfig
from tests.gkv_jax.oracle import Entry, ListCache


class EvictingList(ListCache):
    """``ListCache`` whose KV heads keep what a policy scores highest of what leaves the window."""

    def __init__(self, config: ModelConfig, params: Any, spec: CacheSpec) -> None:
        super().__init__(config, params, spec)
        layers, heads = range(config.num_layers), range(config.num_kv_heads)
        self.groups = config.num_heads // config.num_kv_heads
        self.kept = [[[] for _ in heads] for _ in layers]
        self.gone = -1  # no token up to here is in the ring any more
        self.queries: list[dict[int, np.ndarray]] = [{} for _ in layers]
        self.mass: list[dict[tuple[int, int], float]] = [{} for _ in layers]  # of (head, position)

    def step(self, token: int, position: int) -> np.ndarray:
        logits = super().step(token, position)
        if (position + 1) % self.spec.interval == 0:
            self.choose(position + 1)
        return logits

    def visible(self, layer: int, head: int, position: int) -> list[Entry]:
        entries = self.entries[layer]
        sinks = [e for e in entries if e.position < self.spec.sinks]
        ring = [e for e in entries if e.position >= max(self.spec.sinks, self.gone + 1)]
        return sinks + self.kept[layer][head] + ring

    def _attend(self, layer: int, q: np.ndarray, position: int) -> np.ndarray:
        self.queries[layer][position] = q
        for head in range(self.config.num_kv_heads):
            seen = self.visible(layer, head, position)
            for e, share in zip(seen, self.shares(layer, head, position, seen), strict=True):
                at = head, e.position
                self.mass[layer][at] = self.mass[layer].get(at, 0.0) + share
        return super()._attend(layer, q, position)

    def shares(self, layer: int, head: int, position: int, seen: list[Entry]) -> np.ndarray:
        """Probability of each entry at ``position``, a mean over the head's group."""
        keys = np.stack([self.rotate(e.k[head], e.position) for e in seen])
        total = np.zeros(len(seen))
        for q in self.queries[layer][position][head * self.groups : (head + 1) * self.groups]:
            logits = keys @ self.rotate(q, position) / np.sqrt(q.shape[-1])
            weights = np.exp(logits - logits.max())
            total += weights / weights.sum() / self.groups
        return total

    def choose(self, next_pos: int) -> None:
        spec, frontier = self.spec, next_pos - self.spec.window
        kept: list[list[list[Entry]]] = []
        for layer in range(self.config.num_layers):
            lists = [
                self.visible(layer, head, next_pos) for head in range(self.config.num_kv_heads)
            ]
            scores = self.scores(layer, lists, next_pos)
            kept.append([])
            for head, seen in enumerate(lists):
                old = self.kept[layer][head]
                fixed = [e for e in seen if e.position < spec.sinks or e.position > frontier]
                candidates = [
                    (-score, e not in old, -e.position if e in old else e.position, e)
                    for e, score in zip(seen, scores[head], strict=True)
                    if e not in fixed
                ]
                best = sorted(candidates, key=lambda c: c[:3])[: spec.kept]
                kept[-1].append(sorted((c[3] for c in best), key=lambda e: e.position))
        self.kept, self.gone = kept, max(self.gone, frontier)

    def scores(self, layer: int, lists: list[list[Entry]], next_pos: int) -> list[list[float]]:
        """By head and entry."""
        spec = self.spec
        name = spec.evictor.name if spec.evictor else ""
        if name == "h2o":
            return [
                [self.mass[layer][head, e.position] / (next_pos - e.position) for e in seen]
                for head, seen in enumerate(lists)
            ]
        if name == "keydiff":
            out = []
            for head, seen in enumerate(lists):
                keys = np.stack([self.rotate(e.k[head], e.position) for e in seen])
                unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
                anchor = unit.mean(axis=0)
                out.append((-unit @ anchor / np.linalg.norm(anchor)).tolist())
            return out
        observe = 1 if name == "tova" else spec.observe
        votes = []
        for head, seen in enumerate(lists):
            total = np.zeros(len(seen))
            for at in range(max(0, next_pos - observe), next_pos):
                sees = [e.position <= at for e in seen]
                earlier = [e for e, is_seen in zip(seen, sees, strict=True) if is_seen]
                total[np.array(sees)] += self.shares(layer, head, at, earlier)
            votes.append(total)
        if name == "tova":
            return [np.mean(votes, axis=0).tolist()] * len(lists)
        pooled = []
        for seen, total in zip(lists, votes, strict=True):
            order = sorted(range(len(seen)), key=lambda i: seen[i].position)
            order = [i for i in order if seen[i].position <= next_pos - spec.window]
            half, result = spec.pool // 2, np.zeros(len(seen))
            for place, i in enumerate(order):
                near = order[max(0, place - half) : place + half + 1]
                result[i] = max(total[j] for j in near)
            pooled.append(result.tolist())
        return pooled
