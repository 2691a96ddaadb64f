"""The Llama architecture: Llama 2 and 3, SmolLM2, TinyLlama and everything saved as ``llama``.

Pure functions over a plain pytree, layers unrolled (so that every layer's cache is updated in place
and layers may differ), read top to bottom. Positions are none of its business: see ``Attend``.

Parameters, with linear weights stored ``[in, out]`` (XLA:CPU multiplies a batch of a few rows faster
that way than in the checkpoint's ``[out, in]``)::

    embed [V, Dm]   norm [Dm]   head [V, Dm] (absent when tied to embed)
    layers: a list of  attn_norm [Dm]   q [Dm, Hq·D]   k, v [Dm, Hk·D]   o [Hq·D, Dm]
                       mlp_norm [Dm]    gate, up [Dm, F]   down [F, Dm]
                       and ``<name>_bias [out]`` beside a linear weight, where the model has them
"""

import dataclasses

import jax
import jax.numpy as jnp

from gkv_jax.models.config import ModelConfig
from gkv_jax.models.protocol import Attend, AttentionLayer, Params
from gkv_jax.rope import Rope
from pallas_kernels.masked_head import project


@dataclasses.dataclass(frozen=True)
class Llama:
    """A ``Decoder`` for ``ModelConfig`` of architecture ``llama``."""

    config: ModelConfig

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def num_heads(self) -> int:
        return self.config.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.config.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.config.head_dim

    @property
    def max_positions(self) -> int:
        return self.config.max_position_embeddings

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        layer = AttentionLayer(Rope(self.config.rope, self.config.head_dim))
        return (layer,) * self.config.num_layers

    @staticmethod
    def from_checkpoint(params: Params) -> Params:
        """Parameters as ``gkv_jax.weights`` loads them, ``[out, in]``, in this model's layout."""
        layers = [jax.tree.map(jnp.transpose, layer) for layer in params["layers"]]  # 1-D: as it is
        return {**params, "layers": layers}

    def hidden(self, params: Params, tokens: jax.Array, attend: Attend) -> jax.Array:
        """Tokens ``[B,N]`` int32 to final hidden states ``[B,N,Dm]``, normalised."""
        x = params["embed"][tokens]
        for index, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer{index}"):  # so that profiles and schedules can be read
                x = x + self._attention(layer, index, self._norm(x, layer["attn_norm"]), attend)
                x = x + self._mlp(layer, self._norm(x, layer["mlp_norm"]))
        return self._norm(x, params["norm"])

    def head(self, params: Params) -> jax.Array:
        """The LM head ``[V,Dm]``."""
        head: jax.Array = params["embed" if self.config.tie_word_embeddings else "head"]
        return head

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Hidden states ``[..., Dm]`` to float32 logits ``[..., V]``."""
        head = self.head(params)
        return project(hidden.astype(head.dtype), head)

    def _attention(self, layer: Params, index: int, x: jax.Array, attend: Attend) -> jax.Array:
        batch, queries, _ = x.shape

        def heads(name: str) -> jax.Array:
            return _linear(layer, name, x).reshape(batch, queries, -1, self.head_dim)

        out = attend(index, heads("q"), heads("k"), heads("v"))
        return _linear(layer, "o", out.reshape(batch, queries, -1))

    def _mlp(self, layer: Params, x: jax.Array) -> jax.Array:
        return _linear(
            layer, "down", jax.nn.silu(_linear(layer, "gate", x)) * _linear(layer, "up", x)
        )

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """RMSNorm in float32 (arXiv 1910.07467)."""
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(
            jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.config.rms_norm_eps
        )
        return weight.reshape((1,) * (x.ndim - 1) + (-1,)) * (x32 * scale).astype(x.dtype)


def _linear(layer: Params, name: str, x: jax.Array) -> jax.Array:
    y = x @ layer[name]
    bias = layer.get(f"{name}_bias")
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))
