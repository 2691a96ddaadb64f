"""What both sides are given: queries, keys and values of whole prompts, random and real ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from gkv_jax.models.protocol import Params
from gkv_jax.models.rope_config import RopeConfig
from gkv_jax.models.transformer import Transformer
from gkv_jax.rope import Rope, rotate


@dataclasses.dataclass(frozen=True)
class Sample:
    """Float32 ``q [L,N,Hq,D]``, ``k`` and ``v`` ``[L,N,Hk,D]`` of L layers, before rotation."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    rope: Rope


def random_sample(
    tokens: int, layers: int = 4, query_heads: int = 8, kv_heads: int = 2, dim: int = 64
) -> Sample:
    """Independent normal vectors; no trained model's, but without any structure that could help."""
    rng = np.random.default_rng(0)

    def normal(heads: int) -> np.ndarray:
        return rng.normal(size=(layers, tokens, heads, dim)).astype(np.float32)

    return Sample(
        normal(query_heads), normal(kv_heads), normal(kv_heads), Rope(RopeConfig(1e4), dim)
    )


def model_sample(model: Transformer, params: Params, tokens: list[int]) -> Sample:
    """What every layer of a model makes of a text."""
    positions = jnp.arange(len(tokens))[None]

    def run(params: Params, tokens: jax.Array) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
        seen: list[tuple[jax.Array, jax.Array, jax.Array]] = []

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            seen.append((q[0], k[0], v[0]))
            rope = model.layers[layer].rope
            rotated_q, rotated_k = rotated(rope, q, positions), rotated(rope, k, positions)
            return jax.nn.dot_product_attention(rotated_q, rotated_k, v, is_causal=True)

        model.hidden(params, tokens, attend)
        return seen

    seen = jax.jit(run)(params, jnp.asarray(tokens, jnp.int32)[None])
    q, k, v = (
        np.stack([np.asarray(layer[part], np.float32) for layer in seen]) for part in range(3)
    )
    return Sample(q, k, v, model.layers[0].rope)


def rotated(rope: Rope, x: jax.Array, positions: jax.Array) -> jax.Array:
    """``x [B,N,H,D]`` rotated to ``positions [B,N]``."""
    cos, sin = rope.angles(positions)
    return rotate(x, (cos[:, :, None], sin[:, :, None]))
