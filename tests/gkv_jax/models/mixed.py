"""Two tiny decoders whose layers differ, with the same random weights in transformers.

``GemmaLike`` is Gemma 3's text model (arXiv 2503.19786): five local layers to one global, each kind
with its own rotary base, queries and keys normalised. ``GptOssLike`` is gpt-oss (arXiv 2508.10925):
local and full layers in turn, learned sinks, YaRN, a mixture of experts. Both keep linear weights
``[in, out]``, and norms as they multiply (Gemma's 1 + w).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gkv_jax.models.config import RopeConfig
from gkv_jax.models.protocol import Attend, AttentionLayer, Params
from gkv_jax.rope import Rope
from pallas_kernels.masked_head import project

WINDOW = 8
"""Positions that a query of a local layer sees, itself included."""
VOCAB = 290
"""Wide enough for ``tests.gkv_jax.tiny.byte_tokenizer``."""
_WIDTH = 32
_HEADS, _KV_HEADS = 4, 2


@dataclasses.dataclass(frozen=True)
class _Mixed:
    """What both decoders share, as ``gkv_jax.models.protocol.Decoder`` wants it."""

    layers: tuple[AttentionLayer, ...]
    head_dim: int
    rms_norm_eps: float
    vocab_size: int = VOCAB
    num_kv_heads: int = _KV_HEADS
    max_positions: int = 256

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def head(self, params: Params) -> jax.Array:
        head: jax.Array = params["head"]
        return head

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        return project(hidden.astype(self.head(params).dtype), self.head(params))

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
        x32 = x32 * jax.lax.rsqrt(mean_square + self.rms_norm_eps)
        return (x32 * _along_last(weight.astype(jnp.float32), x)).astype(x.dtype)

    def _heads(self, layer: Params, name: str, x: jax.Array) -> jax.Array:
        return _linear(layer, name, x).reshape(*x.shape[:2], -1, self.head_dim)


@dataclasses.dataclass(frozen=True)
class GemmaLike(_Mixed):
    """Gemma 3. Attention is scaled by ``query_pre_attn_scalar ** -0.5``; the head is the embedding."""

    query_pre_attn_scalar: float = 24.0

    def hidden(self, params: Params, tokens: jax.Array, attend: Attend) -> jax.Array:
        x = params["head"][tokens] * jnp.asarray(_WIDTH**0.5, params["head"].dtype)
        for index, layer in enumerate(params["layers"]):
            y = self._attention(layer, index, self._norm(x, layer["attn_norm"]), attend)
            x = x + self._norm(y, layer["attn_post_norm"])
            y = self._norm(x, layer["mlp_norm"])
            y = jax.nn.gelu(_linear(layer, "gate", y), approximate=True) * _linear(layer, "up", y)
            x = x + self._norm(_linear(layer, "down", y), layer["mlp_post_norm"])
        return self._norm(x, params["norm"])

    def _attention(self, layer: Params, index: int, x: jax.Array, attend: Attend) -> jax.Array:
        q = self._norm(self._heads(layer, "q", x), layer["q_norm"])
        k = self._norm(self._heads(layer, "k", x), layer["k_norm"])
        v = self._heads(layer, "v", x)
        out = attend(index, q, k, v, scale=self.query_pre_attn_scalar**-0.5)
        return _linear(layer, "o", out.reshape(*x.shape[:2], -1))


@dataclasses.dataclass(frozen=True)
class GptOssLike(_Mixed):
    """gpt-oss. Every expert is computed for every token, and all but the best few weigh nothing."""

    experts_per_token: int = 2
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def hidden(self, params: Params, tokens: jax.Array, attend: Attend) -> jax.Array:
        x = params["embed"][tokens]
        for index, layer in enumerate(params["layers"]):
            y = self._norm(x, layer["attn_norm"])
            out = attend(
                index,
                *(self._heads(layer, name, y) for name in ("q", "k", "v")),
                sinks=layer["sinks"].astype(jnp.float32),
            )
            x = x + _linear(layer, "o", out.reshape(*x.shape[:2], -1))
            x = x + self._experts(layer, self._norm(x, layer["mlp_norm"]))
        return self._norm(x, params["norm"])

    def _experts(self, layer: Params, x: jax.Array) -> jax.Array:
        scores, chosen = jax.lax.top_k(_linear(layer, "router", x), self.experts_per_token)
        shares = jax.nn.softmax(scores, axis=-1)
        experts = layer["gate_up"].shape[0]
        share = jnp.einsum(
            "bnk,bnke->bne", shares, jax.nn.one_hot(chosen, experts, dtype=shares.dtype)
        )
        gate_up = jnp.einsum("bnd,edf->bnef", x, layer["gate_up"])
        gate_up = gate_up + layer["gate_up_bias"][None, None]
        gate = jnp.minimum(gate_up[..., ::2], self.swiglu_limit)
        up = jnp.clip(gate_up[..., 1::2], -self.swiglu_limit, self.swiglu_limit)
        inner = (up + 1) * gate * jax.nn.sigmoid(gate * self.swiglu_alpha)
        out = jnp.einsum("bnef,efd->bned", inner, layer["down"]) + layer["down_bias"][None, None]
        return jnp.einsum("bned,bne->bnd", out, share)


def gemma_like(seed: int) -> tuple[GemmaLike, Params, Any]:
    """Seven layers, the sixth global: decoder, float32 parameters, ``Gemma3ForCausalLM``."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    bases = {"sliding_attention": 100.0, "full_attention": 10_000.0}
    config = Gemma3TextConfig(
        **_shared_options(),
        num_hidden_layers=7,
        head_dim=16,
        query_pre_attn_scalar=24,
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in bases.items()
        },
    )
    theirs, state = _random_peer(Gemma3ForCausalLM, config, seed)
    decoder = GemmaLike(
        layers=_layers(config, {kind: RopeConfig(theta) for kind, theta in bases.items()}),
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        query_pre_attn_scalar=config.query_pre_attn_scalar,
    )
    norms = {
        "attn_norm": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
    }

    def layer(at: str) -> Params:
        return (
            {name: 1 + state[f"{at}.{their}.weight"] for name, their in norms.items()}
            | {name: state[f"{at}.self_attn.{name}_proj.weight"].T for name in "qkvo"}
            | {name: state[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down")}
        )

    params = {
        "head": state["model.embed_tokens.weight"],
        "norm": 1 + state["model.norm.weight"],
        "layers": [layer(f"model.layers.{index}") for index in range(decoder.num_layers)],
    }
    return decoder, params, theirs


def gpt_oss_like(seed: int) -> tuple[GptOssLike, Params, Any]:
    """Four layers, the even ones local: decoder, float32 parameters, ``GptOssForCausalLM``."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **_shared_options(),
        num_hidden_layers=4,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=2.0,  # low enough to be met
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    )
    theirs, state = _random_peer(GptOssForCausalLM, config, seed)
    rope = RopeConfig.from_hf(config.to_dict(), config.max_position_embeddings)
    decoder = GptOssLike(
        layers=_layers(config, dict.fromkeys(config.layer_types, rope)),
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        experts_per_token=config.num_experts_per_tok,
        swiglu_limit=config.swiglu_limit,
    )

    def layer(at: str) -> Params:
        linear = {name: f"{at}.self_attn.{name}_proj" for name in "qkvo"}
        linear["router"] = f"{at}.mlp.router"
        experts = f"{at}.mlp.experts"
        return (
            {name: state[f"{their}.weight"].T for name, their in linear.items()}
            | {f"{name}_bias": state[f"{their}.bias"] for name, their in linear.items()}
            | {
                "attn_norm": state[f"{at}.input_layernorm.weight"],
                "mlp_norm": state[f"{at}.post_attention_layernorm.weight"],
                "sinks": state[f"{at}.self_attn.sinks"],
                "gate_up": state[f"{experts}.gate_up_proj"],
                "gate_up_bias": state[f"{experts}.gate_up_proj_bias"],
                "down": state[f"{experts}.down_proj"],
                "down_bias": state[f"{experts}.down_proj_bias"],
            }
        )

    params = {
        "embed": state["model.embed_tokens.weight"],
        "head": state["lm_head.weight"],
        "norm": state["model.norm.weight"],
        "layers": [layer(f"model.layers.{index}") for index in range(decoder.num_layers)],
    }
    return decoder, params, theirs


def _shared_options() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": _WIDTH,
        "intermediate_size": 48,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "sliding_window": WINDOW,
        "max_position_embeddings": 256,
        # Larger than the default, so that attention is not nearly uniform.
        "initializer_range": 0.3,
        "eos_token_id": 256,
        "bos_token_id": None,
        "pad_token_id": None,
    }


def _random_peer(kind: Any, config: Any, seed: int) -> tuple[Any, dict[str, jax.Array]]:
    """A transformers model with random weights, and its parameters as float32 arrays."""
    import torch

    torch.manual_seed(seed)
    model = kind(config).eval()
    for name, parameter in model.named_parameters():  # biases and norms are not 0 and 1 in life
        if parameter.ndim == 1 or name.endswith("bias"):
            ones = "norm" in name and "gemma" not in config.model_type  # Gemma's are offsets to 1
            torch.nn.init.normal_(parameter, mean=float(ones), std=0.2)
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=1.0)
    state = {name: jnp.asarray(value.numpy()) for name, value in model.state_dict().items()}
    return model, state


def _layers(config: Any, ropes: dict[str, RopeConfig]) -> tuple[AttentionLayer, ...]:
    return tuple(
        AttentionLayer(
            Rope(ropes[kind], config.head_dim),
            config.sliding_window if kind == "sliding_attention" else None,
        )
        for kind in config.layer_types
    )


def _linear(layer: Params, name: str, x: jax.Array) -> jax.Array:
    y = x @ layer[name]
    bias = layer.get(f"{name}_bias")
    return y if bias is None else y + _along_last(bias, y)


def _along_last(weight: jax.Array, x: jax.Array) -> jax.Array:
    return weight.reshape((1,) * (x.ndim - 1) + (-1,))
