"""gpt-oss (arXiv 2508.10925): learned sinks, local layers among full ones, a mixture of experts.

A layer of its parameters, E experts::

    attn_norm [Dm]   q [Dm, Hq·D]   k, v [Dm, Hk·D]   o [Hq·D, Dm]   sinks [Hq]
    mlp_norm [Dm]    router [Dm, E]   gate_up [E, Dm, 2F]   down [E, F, Dm]
    and ``<name>_bias`` beside all but norms and sinks: [out], of experts [E, out]

Columns of ``gate_up`` are gate and up in turn. ``GptOss.quantize`` rounds the experts, too: they
become the ``Int8Matrix``es ``gate_up [E·2F, Dm]`` and ``down [E·Dm, F]``. The router stays as it is,
small and decisive.

A step reads the weights of the experts that its tokens chose while tokens times experts per token
are no more than experts, and those of all experts else (``gkv_jax.models.experts``).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gkv_jax.errors import UserError
from gkv_jax.models.config import ModelConfig, common_hf, layer_windows
from gkv_jax.models.experts import mixture, route
from gkv_jax.models.fields import REQUIRED, Fields
from gkv_jax.models.layers import linear, rms_norm_float32
from gkv_jax.models.mxfp4 import Mxfp4Checkpoint
from gkv_jax.models.parameters import Naming, Parameter, module
from gkv_jax.models.protocol import Attend, Params
from gkv_jax.models.rope_config import RopeConfig, rope_options
from gkv_jax.models.transformer import Transformer
from pallas_kernels.int8_matmul import Int8Matrix, int8_matmul, quantize

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The scaling of a configuration that has none, as in transformers."""


@dataclasses.dataclass(frozen=True)
class GptOssConfig(ModelConfig):
    """What gpt-oss needs beside the facts of every decoder.

    Attributes:
      experts: how many a layer has.
      experts_per_token: how many of them compute for a token.
      swiglu_alpha: gain of the sigmoid.
      swiglu_limit: gates are clipped above it, and what they gate to it on both sides.
    """

    experts: int = 32
    experts_per_token: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.experts_per_token <= self.experts:
            raise UserError(
                f"num_experts_per_tok must be from 1 to num_local_experts ({self.experts}), "
                f"not {self.experts_per_token}"
            )
        if not self.swiglu_limit > 0:
            raise UserError(f"swiglu_limit must be above 0, not {self.swiglu_limit}")


@dataclasses.dataclass(frozen=True)
class GptOss(Transformer):
    """Pre-norm; every attention layer has sinks, every feed-forward layer is a mixture of experts."""

    MODEL_TYPES = ("gpt_oss",)
    ARCHITECTURES = ("GptOssForCausalLM",)
    FITS_FLOAT16 = False  # trained in bfloat16, and known to overflow
    FUSED = {"qkv": ("q", "k", "v")}  # noqa: RUF012

    config: GptOssConfig

    @classmethod
    def config_from_hf(cls, fields: Fields, generation: Mapping[str, Any]) -> GptOssConfig:
        fields.serve_only("hidden_act", None, "silu")
        fields.inert("initial_context_length", "output_router_logits", "router_aux_loss_coef")
        common = common_hf(
            fields,
            generation,
            max_positions=131_072,
            kv_heads=8,
            head_dim=64,
            eps=1e-5,
            quantization="mxfp4",  # which tensors it is, their names say
        )
        chosen = fields.integer("num_experts_per_tok", 4)
        fields.serve_only("experts_per_token", None, chosen)  # the older name, beside the newer
        rope = RopeConfig.from_options(
            rope_options(fields, _YARN),
            common["max_position_embeddings"],
            theta=fields.number("rope_theta", 150_000.0),
        )
        window = fields.nullable(fields.integer, "sliding_window", 128)
        kinds = ("sliding_attention", "full_attention")
        return GptOssConfig(
            **common,
            attention_bias=fields.flag("attention_bias", True),
            mlp_bias=True,
            rope=rope,
            windows=layer_windows(
                fields, window, [kinds[layer % 2] for layer in range(common["num_layers"])]
            ),
            experts=fields.integer(
                "num_local_experts", fields.integer("num_experts", None) or REQUIRED
            ),
            experts_per_token=chosen,
            swiglu_alpha=fields.number("swiglu_alpha", 1.702),
            swiglu_limit=fields.number("swiglu_limit", 7.0),
        )

    def layer_parameters(self, layer: int) -> Iterator[Parameter]:
        config = self.config
        hidden, inner, experts = config.hidden_size, config.intermediate_size, config.experts
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        bias = config.attention_bias
        for name, huggingface, shape, biased in (
            ("attn_norm", "input_layernorm", (hidden,), False),
            ("q", "self_attn.q_proj", (queries, hidden), bias),
            ("k", "self_attn.k_proj", (keys, hidden), bias),
            ("v", "self_attn.v_proj", (keys, hidden), bias),
            ("o", "self_attn.o_proj", (hidden, queries), bias),
            ("mlp_norm", "post_attention_layernorm", (hidden,), False),
            ("router", "mlp.router", (experts, hidden), True),
        ):
            yield from module(layer, name, huggingface, _NO_GGUF, shape, biased)
        leaves: tuple[tuple[str, str, tuple[int, ...]], ...] = (
            ("sinks", "self_attn.sinks", (self.num_heads,)),
            ("gate_up", "mlp.experts.gate_up_proj", (experts, hidden, 2 * inner)),
            ("gate_up_bias", "mlp.experts.gate_up_proj_bias", (experts, 2 * inner)),
            ("down", "mlp.experts.down_proj", (experts, inner, hidden)),
            ("down_bias", "mlp.experts.down_proj_bias", (experts, hidden)),
        )
        for name, huggingface, stored in leaves:
            yield Parameter(name, layer, f"model.layers.{layer}.{huggingface}", _NO_GGUF, stored)

    def checkpoint(
        self, tensors: Mapping[str, np.ndarray], naming: Naming
    ) -> Mapping[str, np.ndarray]:
        """Published checkpoints have their experts in MXFP4; bfloat16 is exactly what they say."""
        return Mxfp4Checkpoint(tensors)

    def hidden(self, params: Params, tokens: jax.Array, attend: Attend) -> jax.Array:
        """Tokens ``[B,N]`` int32 to final hidden states ``[B,N,Dm]``, normalised."""
        x = params["embed"][tokens]
        for index, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer{index}"):  # so that profiles and schedules can be read
                x = x + self._attention(layer, index, self._norm(x, layer["attn_norm"]), attend)
                x = x + self._experts(layer, self._norm(x, layer["mlp_norm"]))
        return self._norm(x, params["norm"])

    def quantize(self, params: Params) -> Params:
        """The same parameters with int8 weights: attention, experts and the head."""
        rounded = super().quantize(params)
        layers = [
            new
            | {"router": layer["router"]}
            | {name: _quantize_experts(layer[name]) for name in ("gate_up", "down")}
            for new, layer in zip(rounded["layers"], params["layers"], strict=True)
        ]
        return {**rounded, "layers": layers}

    def _attention(self, layer: Params, index: int, x: jax.Array, attend: Attend) -> jax.Array:
        q, k, v = self.qkv(layer, x)
        out = attend(index, q, k, v, sinks=layer["sinks"].astype(jnp.float32))
        return linear(layer, "o", out.reshape(*x.shape[:2], -1))

    def _experts(self, layer: Params, x: jax.Array) -> jax.Array:
        config = self.config
        rows = x.reshape(-1, x.shape[-1])
        experts, shares = route(linear(layer, "router", rows), config.experts_per_token)

        def apply(expert: jax.Array, x: jax.Array) -> jax.Array:
            gate_up = _expert_linear(layer, "gate_up", expert, x)
            return _expert_linear(layer, "down", expert, self._swiglu(gate_up))

        return mixture(rows, experts, shares, config.experts, apply).reshape(x.shape)

    def _swiglu(self, gate_up: jax.Array) -> jax.Array:
        limit = self.config.swiglu_limit
        gate = jnp.minimum(gate_up[..., ::2], limit)
        up = jnp.clip(gate_up[..., 1::2], -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(gate * self.config.swiglu_alpha)

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm_float32(x, weight, self.config.rms_norm_eps)


_NO_GGUF = "none"
"""GGUF files have gate and up apart and are not read, see ``families.from_gguf``."""


def _quantize_experts(weight: jax.Array) -> Int8Matrix:
    """``[E, in, out]`` to a matrix ``[E·out, in]``, a scale for each output of each expert."""
    return quantize(weight.swapaxes(1, 2).reshape(-1, weight.shape[1]))


def _expert_linear(layer: Params, name: str, expert: jax.Array, x: jax.Array) -> jax.Array:
    """``x [M, in]`` times the weight of one expert, plus its bias."""
    weight, bias = layer[name], layer[f"{name}_bias"]
    if isinstance(weight, Int8Matrix):
        out = bias.shape[1]
        y = int8_matmul(x, weight.rows(expert * out, out)).astype(x.dtype)
    else:
        y = x @ jax.lax.dynamic_index_in_dim(weight, expert, keepdims=False)
    return y + jax.lax.dynamic_index_in_dim(bias, expert)
