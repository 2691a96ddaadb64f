"""Scores and kept tokens by our cache, set up to kvpress's definitions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kvpress.samples import Sample
from gkv_jax.cache import CacheSpec, Evidence, PromptAttend, init_cache
from gkv_jax.models.protocol import AttentionLayer
from gkv_jax.rope import Rope


def specs(budget: int) -> dict[str, CacheSpec]:
    """Caches that hold ``budget`` tokens of a prompt, by policy.

    kvpress pins the last tokens in SnapKV (64) and TOVA (1) and the first in StreamingLLM and Expected
    Attention (4). Our ``window`` counts the next token, too.
    """
    return {
        "window": CacheSpec(sinks=4, window=budget - 4 + 1),
        "snapkv": CacheSpec(
            policy="snapkv", sinks=0, kept=budget - 64, window=64 + 1, observe=64, pool=5,
            pooling="mean",
        ),
        "h2o": CacheSpec(policy="h2o", sinks=0, kept=budget, window=1, decode="stream"),
        "tova": CacheSpec(policy="tova", sinks=0, kept=budget - 1, window=1 + 1, decode="stream"),
        "keydiff": CacheSpec(policy="keydiff", sinks=0, kept=budget, window=1),
        "expected_attention": CacheSpec(
            policy="expected_attention", sinks=4, kept=budget - 4, window=1
        ),
    }  # fmt: skip


def choosable(spec: CacheSpec, tokens: int) -> slice:
    """The positions of a prompt that are neither sinks nor in the window."""
    return slice(spec.sinks, tokens - spec.window + 1)


@dataclasses.dataclass(frozen=True)
class _OneLayer:
    """As much of a ``Decoder`` as its cache needs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[AttentionLayer, ...]
    num_layers: int = 1


def read(sample: Sample, layer: int, spec: CacheSpec) -> tuple[np.ndarray | None, list[set[int]]]:
    """A layer's prompt through the cache: scores ``[Hk,N]`` if it has any, and each head's tokens."""
    q, k, v = (jnp.asarray(part[layer])[None] for part in (sample.q, sample.k, sample.v))
    scores, kept, slot_pos = _read(q, k, v, spec=spec, rope=sample.rope)
    chosen = np.zeros((k.shape[2], 0)) if kept is None else np.asarray(kept)
    shared = np.concatenate([slot_pos[: spec.sinks], slot_pos[spec.prefix :]]).tolist()
    held = [{p for p in shared + own.tolist() if p >= 0} for own in chosen]
    return (None if scores is None else np.asarray(scores)), held


@functools.partial(jax.jit, static_argnames=("spec", "rope"))
def _read(
    q: jax.Array, k: jax.Array, v: jax.Array, *, spec: CacheSpec, rope: Rope
) -> tuple[jax.Array | None, jax.Array | None, jax.Array]:
    """Scores ``[Hk,N]``, chosen positions ``[Hk,kept]`` and ``slot_pos [C]``."""
    seen: list[jax.Array] = []
    policy = spec.selector
    if policy is not None:
        score = policy.score

        def recording(evidence: Evidence, spec: CacheSpec) -> jax.Array:
            seen.append(score(evidence, spec))
            return seen[-1]

        spec = dataclasses.replace(spec, policy=dataclasses.replace(policy, score=recording))
    tokens = q.shape[1]
    model = _OneLayer(q.shape[2], k.shape[2], q.shape[3], (AttentionLayer(rope),))
    empty = init_cache(spec, model, 1, jnp.dtype("float32"))
    attend = PromptAttend(spec, model, empty, jnp.int32(0), jnp.int32(tokens), tokens)
    attend(0, q, k, v)
    kept = attend.cache.layers[0].kept_pos
    return (
        seen[0][0] if seen else None,
        None if kept is None else kept[0],
        attend.cache.slots[0].slot_pos[0],
    )
