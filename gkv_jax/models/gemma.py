"""Gemma 2 (arXiv 2408.00118) and the text of Gemma 3 (arXiv 2503.19786).

A layer of its parameters, norms as checkpoints of transformers store them (they multiply by 1 + w)::

    attn_norm, attn_post_norm [Dm]   q [Dm, Hq·D]   k, v [Dm, Hk·D]   o [Hq·D, Dm]
    mlp_norm, mlp_post_norm [Dm]     gate, up [Dm, F]   down [F, Dm]
    and q_norm, k_norm [D] in Gemma 3; ``<name>_bias [out]`` of q, k, v, o where the model has them
"""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gkv_jax.errors import UserError
from gkv_jax.models.config import (
    INERT,
    GGUFHeader,
    ModelConfig,
    check_quantization,
    common_gguf,
    common_hf,
    layer_windows,
    token_ids,
)
from gkv_jax.models.fields import Fields
from gkv_jax.models.layers import linear, linears, rms_norm_float32
from gkv_jax.models.parameters import Changed, Naming, Parameter, Renamed, module
from gkv_jax.models.protocol import Attend, AttentionLayer, Params
from gkv_jax.models.rope_config import RopeConfig, rope_options
from gkv_jax.models.transformer import Transformer
from gkv_jax.rope import Rope
from pallas_kernels.masked_head import Head, SoftCapped

_log = logging.getLogger(__name__)

_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0
"""Bases of Gemma 3's two kinds of layers, unless a file says otherwise."""


@dataclasses.dataclass(frozen=True)
class GemmaConfig(ModelConfig):
    """What Gemma's layers need beside the facts of every decoder.

    Attributes:
      query_pre_attn_scalar: products of queries and keys are scaled by its ``** -0.5``.
      attention_cap: soft cap of the attention scores, or None.
      final_cap: soft cap of the logits, or None.
      local_rope: rotation of the layers with a window; None for that of the others.
      qk_norm: whether queries and keys are normalised.
    """

    query_pre_attn_scalar: float = 256.0
    attention_cap: float | None = None
    final_cap: float | None = None
    local_rope: RopeConfig | None = None
    qk_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("query_pre_attn_scalar", "attention_cap", "final_cap"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise UserError(f"{field} must be above 0, not {value}")


@dataclasses.dataclass(frozen=True)
class Gemma(Transformer):
    """Norms before and after each block, GELU-gated, local layers among the global ones."""

    MODEL_TYPES = ("gemma2", "gemma3_text", "gemma3")
    ARCHITECTURES = (
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
    )
    GGUF_ARCHITECTURES = ("gemma2", "gemma3")
    FITS_FLOAT16 = False  # the residual stream of published checkpoints passes 65 504
    FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}  # noqa: RUF012

    config: GemmaConfig

    @classmethod
    def config_from_hf(cls, fields: Fields, generation: Mapping[str, Any]) -> GemmaConfig:
        if fields.get("model_type") != "gemma3":
            return _config_from_hf(fields, generation)
        _log.warning("config.json: this Gemma 3 takes images, too; only its text is served")
        fields.inert(*INERT, *_OF_IMAGES, "bos_token_id")
        check_quantization(fields)
        # What this file leaves out is as in transformers' Gemma3TextConfig, and it leaves out much.
        text = {**_TEXT_DEFAULTS, **fields.mapping("text_config")}
        # Whether the embedding is the head's, the outer configuration says first.
        tied = text.get("tie_word_embeddings", True)
        text["tie_word_embeddings"] = fields.flag("tie_word_embeddings", tied)
        inner = Fields(text, f"{fields.where}text_config.")
        inner.inert("architectures")
        inner.serve_only("model_type", "gemma3_text")
        config = _config_from_hf(inner, generation)
        inner.finish()
        ends = dict.fromkeys([*token_ids((fields, "eos_token_id")), *config.eos_token_ids])
        return dataclasses.replace(config, architecture="gemma3", eos_token_ids=tuple(ends))

    @classmethod
    def config_from_gguf(cls, fields: Fields, header: GGUFHeader) -> GemmaConfig:
        common = common_gguf(fields, header)
        is_2 = common["architecture"] == "gemma2"
        # The files say as much as llama.cpp must know; the rest it has by name, or from the size.
        is_27b = common["num_layers"] == (46 if is_2 else 62)
        per_head = common["hidden_size"] // max(common["num_heads"], 1)
        window = fields.integer("attention.sliding_window", 4096 if is_2 else 0)
        key, period = "attention.sliding_window_pattern", 2 if is_2 else 6
        if isinstance(fields.get(key), list):  # which layers are local, one by one
            kinds = fields.sequence(key)
        else:
            kinds = _pattern(common["num_layers"], fields.integer(key, period))
        local_base = fields.number("rope.freq_base_swa", _LOCAL_THETA)
        return GemmaConfig(
            **common,
            windows=tuple(window if local else None for local in kinds) if window else (),
            query_pre_attn_scalar=float(per_head if is_27b else common["head_dim"]),
            attention_cap=fields.number("attn_logit_softcapping", 50.0) if is_2 else None,
            final_cap=_cap(fields, "final_logit_softcapping", 30.0 if is_2 else None),
            local_rope=None if is_2 else RopeConfig(local_base),
            qk_norm=not is_2,
        )

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """Global layers, and local ones, which may turn with another base."""
        config = self.config
        everywhere = Rope(config.rope, config.head_dim)
        local = Rope(config.local_rope or config.rope, config.head_dim)
        windows = config.windows or (None,) * self.num_layers
        return tuple(AttentionLayer(local if w else everywhere, w) for w in windows)

    def layer_parameters(self, layer: int) -> Iterator[Parameter]:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        biased = ("q", "k", "v", "o") if self.config.attention_bias else ()
        for name, huggingface, gguf, shape in (
            ("attn_norm", "input_layernorm", "attn_norm", (hidden,)),
            ("q", "self_attn.q_proj", "attn_q", (queries, hidden)),
            ("k", "self_attn.k_proj", "attn_k", (keys, hidden)),
            ("v", "self_attn.v_proj", "attn_v", (keys, hidden)),
            ("q_norm", "self_attn.q_norm", "attn_q_norm", (self.head_dim,)),
            ("k_norm", "self_attn.k_norm", "attn_k_norm", (self.head_dim,)),
            ("o", "self_attn.o_proj", "attn_output", (hidden, queries)),
            ("attn_post_norm", "post_attention_layernorm", "post_attention_norm", (hidden,)),
            ("mlp_norm", "pre_feedforward_layernorm", "ffn_norm", (hidden,)),
            ("gate", "mlp.gate_proj", "ffn_gate", (inner, hidden)),
            ("up", "mlp.up_proj", "ffn_up", (inner, hidden)),
            ("down", "mlp.down_proj", "ffn_down", (hidden, inner)),
            ("mlp_post_norm", "post_feedforward_layernorm", "post_ffw_norm", (hidden,)),
        ):
            if self.config.qk_norm or name not in ("q_norm", "k_norm"):
                yield from module(layer, name, huggingface, gguf, shape, name in biased)

    def checkpoint(
        self, tensors: Mapping[str, np.ndarray], naming: Naming
    ) -> Mapping[str, np.ndarray]:
        """GGUF's norms are 1 + w. Of a model with images, the tensors of the language model."""
        if naming == "gguf":
            return Changed(tensors, _without_one)
        return Renamed(tensors, _of_text) if self.config.architecture == "gemma3" else tensors

    def hidden(self, params: Params, tokens: jax.Array, attend: Attend) -> jax.Array:
        """Tokens ``[B,N]`` int32 to final hidden states ``[B,N,Dm]``, normalised."""
        x = params["embed"][tokens]
        x = x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)  # rounded as the embedding is
        for index, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer{index}"):  # so that profiles and schedules can be read
                y = self._attention(layer, index, self._norm(x, layer["attn_norm"]), attend)
                x = x + self._norm(y, layer["attn_post_norm"])
                y = self._mlp(layer, self._norm(x, layer["mlp_norm"]))
                x = x + self._norm(y, layer["mlp_post_norm"])
        return self._norm(x, params["norm"])

    def head(self, params: Params) -> Head:
        """The LM head ``[V,Dm]``, with the soft cap that the logits may have."""
        head, cap = super().head(params), self.config.final_cap
        return head if cap is None else SoftCapped(head, cap)

    def _attention(self, layer: Params, index: int, x: jax.Array, attend: Attend) -> jax.Array:
        config = self.config
        q, k, v = self.qkv(layer, x)
        if config.qk_norm:
            q, k = self._norm(q, layer["q_norm"]), self._norm(k, layer["k_norm"])
        scale = config.query_pre_attn_scalar**-0.5
        out = attend(index, q, k, v, scale=scale, soft_cap=config.attention_cap)
        return linear(layer, "o", out.reshape(*x.shape[:2], -1))

    def _mlp(self, layer: Params, x: jax.Array) -> jax.Array:
        widths = [self.config.intermediate_size] * 2
        gate, up = linears(layer, "gate_up", self.FUSED["gate_up"], x, widths)
        return linear(layer, "down", jax.nn.gelu(gate, approximate=True) * up)

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm_float32(x, 1 + weight.astype(jnp.float32), self.config.rms_norm_eps)


# --- Hugging Face -------------------------------------------------------------------------------

_OF_IMAGES = (
    "boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "image_token_id",
    "image_token_index", "mm_tokens_per_image", "vision_config",
)  # fmt: skip

_TEXT_DEFAULTS = {
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def _config_from_hf(fields: Fields, generation: Mapping[str, Any]) -> GemmaConfig:
    """Of ``model_type`` gemma2 or gemma3_text; defaults are those of transformers."""
    is_2 = fields.get("model_type") == "gemma2"
    for key in ("hidden_act", "hidden_activation"):
        fields.serve_only(key, None, "gelu_pytorch_tanh")
    fields.serve_only("use_bidirectional_attention", None, False)
    common = common_hf(
        fields,
        generation,
        max_positions=8192 if is_2 else 131_072,
        kv_heads=4,
        head_dim=256,
        tied=True,
    )
    if is_2:
        period, local_rope = 2, None
        rope = RopeConfig.from_hf(fields, common["max_position_embeddings"])
    else:
        fields.serve_only("attn_logit_softcapping", None)
        period = fields.integer("_sliding_window_pattern", 6)
        period = fields.integer("sliding_window_pattern", period)
        rope, local_rope = _ropes(fields, common["max_position_embeddings"])
    window = fields.nullable(fields.integer, "sliding_window", 4096)
    fields.serve_only("sliding_window_size", None, window)  # the older name, beside the newer
    kinds = ("full_attention", "sliding_attention")
    default = [kinds[local] for local in _pattern(common["num_layers"], period)]
    return GemmaConfig(
        **common,
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=False,
        rope=rope,
        windows=layer_windows(fields, window, default),
        query_pre_attn_scalar=fields.number("query_pre_attn_scalar", 256),
        attention_cap=_cap(fields, "attn_logit_softcapping", 50.0) if is_2 else None,
        final_cap=_cap(fields, "final_logit_softcapping", 30.0 if is_2 else None),
        local_rope=local_rope,
        qk_norm=not is_2,
    )


def _ropes(fields: Fields, max_positions: int) -> tuple[RopeConfig, RopeConfig]:
    """Gemma 3's rotations of global and of local layers."""
    theta = fields.number("rope_theta", _GLOBAL_THETA)
    local_theta = fields.number("rope_local_base_freq", _LOCAL_THETA)
    options = rope_options(fields)
    if not fields.get("rope_parameters"):  # transformers 4: a scaling of the global layers
        return RopeConfig.from_options(options, max_positions, theta=theta), RopeConfig(local_theta)
    globally, locally = (
        RopeConfig.from_options(
            Fields(options.mapping(kind, {}), f"{options.where}{kind}."), max_positions, theta=base
        )
        for kind, base in (("full_attention", theta), ("sliding_attention", local_theta))
    )
    options.finish()  # there are no others
    return globally, locally


def _of_text(name: str) -> str | None:
    """What a tensor of ``Gemma3ForConditionalGeneration`` is called in a language model, or None."""
    inner = name.removeprefix("model.")
    if inner.startswith(("vision_tower.", "multi_modal_projector.")):
        return None
    if inner.startswith("language_model."):
        # Either library's order: language_model.model.layers, model.language_model.layers.
        inner = inner.removeprefix("language_model.").removeprefix("model.")
        return inner if inner.startswith("lm_head.") else f"model.{inner}"
    return name


# --- Both ---------------------------------------------------------------------------------------


def _pattern(num_layers: int, period: int) -> Sequence[bool]:
    """Which layers are local: all but the last of every ``period``."""
    if period < 1:
        raise UserError(f"sliding_window_pattern must be at least 1, not {period}")
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _cap(fields: Fields, key: str, default: float | None) -> float | None:
    """A soft cap. None where the file says null; where it says nothing, ``default``."""
    cap: float | None = fields.nullable(fields.number, key, default)
    return cap


def _without_one(name: str, array: np.ndarray) -> np.ndarray:
    """llama.cpp's converter adds the 1 to Gemma's norms."""
    return array - 1 if name.endswith("norm.weight") else array
