"""The Llama architecture: Llama 2 and 3, SmolLM2, TinyLlama and everything saved as ``llama``.

Pure functions over a plain pytree, layers unrolled (so that every layer's cache is updated in place
and layers may differ), read top to bottom. Positions are none of its business: see ``Attend``.

Parameters, with linear weights stored ``[in, out]`` (XLA:CPU multiplies a batch of a few rows faster
that way than in the checkpoint's ``[out, in]``)::

    embed [V, Dm]   norm [Dm]   head [V, Dm] (absent when tied to embed)
    layers: a list of  attn_norm [Dm]   q [Dm, Hq·D]   k, v [Dm, Hk·D]   o [Hq·D, Dm]
                       mlp_norm [Dm]    gate, up [Dm, F]   down [F, Dm]
                       and ``<name>_bias [out]`` beside a linear weight, where the model has them

``Llama.quantize`` makes int8 of them: linear weights become ``Int8Matrix``es, those that read the same
input in one (``qkv``, ``gate_up``), and so does the head, tied or not.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gkv_jax.models.config import ModelConfig
from gkv_jax.models.protocol import Attend, AttentionLayer, Params
from gkv_jax.rope import Rope
from pallas_kernels.int8_matmul import Int8Matrix, int8_matmul, quantize
from pallas_kernels.masked_head import Head, project

_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""Weights that read the same input, and what they are called together."""


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

    def quantize(self, params: Params) -> Params:
        """The same parameters with int8 weights (embedding, norms and biases stay as they are)."""

        def of_layer(layer: Params) -> Params:
            rest = {name: leaf for name, leaf in layer.items() if leaf.ndim == 1}
            for name in ("o", "down"):
                rest[name] = quantize(layer[name].T)
            for name, parts in _FUSED.items():
                rest[name] = quantize(jnp.concatenate([layer[part].T for part in parts]))
            return rest

        layers = [of_layer(layer) for layer in params["layers"]]
        name = "embed" if self.config.tie_word_embeddings else "head"
        return {**params, "layers": layers, "head": quantize(params[name])}

    def hidden(self, params: Params, tokens: jax.Array, attend: Attend) -> jax.Array:
        """Tokens ``[B,N]`` int32 to final hidden states ``[B,N,Dm]``, normalised."""
        x = params["embed"][tokens]
        for index, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer{index}"):  # so that profiles and schedules can be read
                x = x + self._attention(layer, index, self._norm(x, layer["attn_norm"]), attend)
                x = x + self._mlp(layer, self._norm(x, layer["mlp_norm"]))
        return self._norm(x, params["norm"])

    def head(self, params: Params) -> Head:
        """The LM head ``[V,Dm]``."""
        head: Head = params["head"] if "head" in params else params["embed"]
        return head

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Hidden states ``[..., Dm]`` to float32 logits ``[..., V]``."""
        head = self.head(params)
        return project(hidden.astype(head.dtype), head)

    def _attention(self, layer: Params, index: int, x: jax.Array, attend: Attend) -> jax.Array:
        batch, queries, _ = x.shape

        config = self.config
        widths = [n * self.head_dim for n in (config.num_heads, *[config.num_kv_heads] * 2)]
        projected = _linears(layer, "qkv", x, widths)
        q, k, v = (y.reshape(batch, queries, -1, self.head_dim) for y in projected)
        out = attend(index, q, k, v)
        return _linear(layer, "o", out.reshape(batch, queries, -1))

    def _mlp(self, layer: Params, x: jax.Array) -> jax.Array:
        gate, up = _linears(layer, "gate_up", x, [self.config.intermediate_size] * 2)
        return _linear(layer, "down", jax.nn.silu(gate) * up)

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """RMSNorm in float32 (arXiv 1910.07467)."""
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(
            jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.config.rms_norm_eps
        )
        return weight.reshape((1,) * (x.ndim - 1) + (-1,)) * (x32 * scale).astype(x.dtype)


def _linears(layer: Params, fused: str, x: jax.Array, widths: Sequence[int]) -> Sequence[jax.Array]:
    """Several linear maps of ``x``, of these output widths, in one product where they are fused."""
    names = _FUSED[fused]
    if fused not in layer:
        return [_linear(layer, name, x) for name in names]
    ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
    parts = jnp.split(_product(x, layer[fused]), ends, axis=-1)
    return [_add_bias(layer, name, part) for name, part in zip(names, parts, strict=True)]


def _linear(layer: Params, name: str, x: jax.Array) -> jax.Array:
    return _add_bias(layer, name, _product(x, layer[name]))


def _product(x: jax.Array, weight: jax.Array | Int8Matrix) -> jax.Array:
    if isinstance(weight, Int8Matrix):
        return int8_matmul(x, weight).astype(x.dtype)
    return x @ weight


def _add_bias(layer: Params, name: str, y: jax.Array) -> jax.Array:
    bias = layer.get(f"{name}_bias")
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))
