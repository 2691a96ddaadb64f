"""Model configuration, read from a Hugging Face ``config.json`` or from GGUF metadata.

An option that changes what the network computes is either served or refused by name; nothing of the
kind is ignored.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gkv_jax.errors import UserError
from gkv_jax.models.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling

__all__ = [
    "ARCHITECTURES",
    "LinearScaling",
    "Llama3Scaling",
    "ModelConfig",
    "RopeConfig",
    "YarnScaling",
]

ARCHITECTURES = ("llama",)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes the shapes and the arithmetic of a decoder.

    Hashable, so it can be a static argument of a jitted function. ``vocab_size`` is the width of
    the logits, which may exceed the number of tokens that the tokenizer knows. ``eos_token_ids``
    are the tokens that the model's own configuration names as ends of a generation, in its order.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise UserError(
                f"architecture {self.architecture!r} is not served; "
                f"known: {', '.join(ARCHITECTURES)}"
            )
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, field) < 1:
                raise UserError(f"{field} must be at least 1, not {getattr(self, field)}")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        rotary_dim = self.rope.rotary_dim(self.head_dim)
        if rotary_dim < 2 or rotary_dim % 2:
            raise UserError(
                "head_dim * partial_rotary_factor must be even for rotary embeddings, "
                f"not {self.head_dim} * {self.rope.partial_rotary_factor}"
            )

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Read a ``config.json`` as written by transformers 4 or 5.

        ``generation_config`` (``generation_config.json``) adds its end-of-sequence tokens.
        Raises UserError, naming the field, for an architecture or option that is not served.
        """
        architecture = config.get("model_type")
        if architecture not in ARCHITECTURES:
            raise UserError(
                f"config.json: model_type {architecture!r} is not served; "
                f"known: {', '.join(ARCHITECTURES)}"
            )
        _refuse_unserved_hf(config)
        num_heads = _required(config, "num_attention_heads")
        hidden_size = _required(config, "hidden_size")
        # The defaults are those of transformers' LlamaConfig.
        max_position_embeddings = _optional(config, "max_position_embeddings", 2048)
        return cls(
            architecture="llama",
            vocab_size=_required(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required(config, "intermediate_size"),
            num_layers=_required(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_optional(config, "num_key_value_heads", num_heads),
            head_dim=_optional(config, "head_dim", hidden_size // max(num_heads, 1)),
            rms_norm_eps=float(_optional(config, "rms_norm_eps", 1e-6)),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=_optional(config, "tie_word_embeddings", False),
            attention_bias=_optional(config, "attention_bias", False),
            mlp_bias=_optional(config, "mlp_bias", False),
            rope=RopeConfig.from_hf(config, max_position_embeddings),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_unique(
                _ids(config.get("eos_token_id"))
                + _ids((generation_config or {}).get("eos_token_id"))
            ),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        tensor_names: Collection[str],
        llama3_scaling: Llama3Scaling | None = None,
    ) -> "ModelConfig":
        """Read GGUF metadata (key to Python value; arrays as lists).

        GGUF writes neither tying nor biases down: both follow from ``tensor_names``. Llama 3's RoPE
        scaling is stored as a tensor; its reader passes what it found as ``llama3_scaling``.
        Raises UserError, naming the key, for an architecture or option that is not served.
        """
        architecture = metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise UserError(
                f"GGUF: general.architecture {architecture!r} is not served; "
                f"known: {', '.join(ARCHITECTURES)}"
            )
        scoped = _llama_metadata(metadata)
        num_heads = _gguf_int(scoped, "attention.head_count")
        hidden_size = _gguf_int(scoped, "embedding_length")
        head_dim = _gguf_int(scoped, "attention.key_length", hidden_size // max(num_heads, 1))
        for key in ("attention.value_length", "rope.dimension_count"):
            if _gguf_int(scoped, key, head_dim) != head_dim:
                raise UserError(
                    f"GGUF: llama.{key} {scoped[key]} differs from the head width {head_dim}"
                )
        tokens = metadata.get("tokenizer.ggml.tokens", ())
        context_length = _gguf_int(scoped, "context_length")
        return cls(
            architecture="llama",
            vocab_size=_gguf_int(scoped, "vocab_size", len(tokens)),
            hidden_size=hidden_size,
            intermediate_size=_gguf_int(scoped, "feed_forward_length"),
            num_layers=_gguf_int(scoped, "block_count"),
            num_heads=num_heads,
            num_kv_heads=_gguf_int(scoped, "attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=_shortest_float32(_gguf_value(scoped, "attention.layer_norm_rms_epsilon")),
            max_position_embeddings=context_length,
            tie_word_embeddings="output.weight" not in tensor_names,
            attention_bias="blk.0.attn_q.bias" in tensor_names,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
            rope=RopeConfig.from_gguf(scoped, context_length, llama3_scaling),
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=_unique(
                _ids(metadata.get("tokenizer.ggml.eos_token_id"))
                + _ids(metadata.get("tokenizer.ggml.eot_token_id"))
            ),
        )


# --- Hugging Face -------------------------------------------------------------------------------

# Options of which only these values are served. None stands for "absent or null".
_SERVED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu", "swish"),
    "pretraining_tp": (None, 1),
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
    "rope_interleaved": (None, False),
    "quantization_config": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}

_READ = frozenset(
    {
        "model_type",
        "architectures",
        "layer_types",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
    }
)

# Says nothing about the arithmetic of inference: provenance, training, storage.
_INERT = frozenset(
    {
        "_name_or_path",
        "attention_dropout",
        "dtype",
        "initializer_range",
        "is_llama_config",
        "pad_token_id",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "use_cache",
    }
)


def _refuse_unserved_hf(config: Mapping[str, Any]) -> None:
    for field, served in _SERVED_VALUES.items():
        if config.get(field) not in served:
            raise UserError(
                f"config.json: {field}={config[field]!r} is not served "
                f"(served: {', '.join(repr(value) for value in served)})"
            )
    classes = config.get("architectures") or ["LlamaForCausalLM"]
    if "LlamaForCausalLM" not in classes:
        raise UserError(f"config.json: architectures={classes!r} has no LlamaForCausalLM")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise UserError("config.json: layer_types other than full_attention are not served")
    unknown = sorted(set(config) - _READ - _INERT - set(_SERVED_VALUES))
    if unknown:
        _log.warning("config.json: these fields are not read: %s", ", ".join(unknown))


def _required(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int):
        raise UserError(f"config.json: {field} must be an integer, not {value!r}")
    return value


def _optional(config: Mapping[str, Any], field: str, default: Any) -> Any:
    value = config.get(field)
    return default if value is None else value


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _unique(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


# --- GGUF ---------------------------------------------------------------------------------------

_GGUF_READ = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "vocab_size",
    }
)

# Keys of which only these values change nothing: expert_count 0 is how a dense model may say so.
_GGUF_INERT: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.finetuned": (False, True),
    "tensor_data_layout": ("Meta AI original pth",),
}


def _llama_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "llama."
    scoped = {
        key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)
    }
    for key, value in scoped.items():
        if key not in _GGUF_READ and value not in _GGUF_INERT.get(key, ()):
            raise UserError(f"GGUF: {prefix}{key}={value!r} is not served")
    return scoped


def _gguf_value(scoped: Mapping[str, Any], key: str) -> Any:
    if key not in scoped:
        raise UserError(f"GGUF: the metadata has no llama.{key}; the file is incomplete")
    return scoped[key]


def _gguf_int(scoped: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = default if default is not None and key not in scoped else _gguf_value(scoped, key)
    if not isinstance(value, int):
        raise UserError(f"GGUF: llama.{key}={value!r} is not served; one integer is expected")
    return value


def _shortest_float32(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 was written as 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))
