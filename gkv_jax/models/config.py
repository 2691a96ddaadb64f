"""Model configuration: the facts that every family has, and how files state them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gkv_jax.errors import UserError
from gkv_jax.models.fields import Fields, is_integer
from gkv_jax.models.rope_config import RopeConfig

MOST_LAYERS = 10_000
"""Far beyond any model."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes the shapes and the arithmetic of a decoder.

    Hashable, so it can be a static argument of a jitted function. ``vocab_size`` is the width of
    the logits, which may exceed the number of tokens that the tokenizer knows. ``eos_token_ids``
    are the tokens that the model's own configuration names as ends of a generation, in its order.
    ``windows`` are, per layer, the positions that a query sees, itself included, or None; () if
    every layer sees all. A family that needs more has a subclass.
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
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
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
        if not self.rms_norm_eps >= 0:
            raise UserError(f"rms_norm_eps must be at least 0, not {self.rms_norm_eps}")
        for name, ids in (
            ("bos_token_id", () if self.bos_token_id is None else (self.bos_token_id,)),
            ("eos_token_id", self.eos_token_ids),
        ):
            if beyond := [token for token in ids if not 0 <= token < self.vocab_size]:
                raise UserError(
                    f"{name} {beyond[0]} is no token of a vocabulary of {self.vocab_size}"
                )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise UserError(f"windows are {len(self.windows)}, but num_layers is {self.num_layers}")
        for window in self.windows:
            if window is not None and window < 1:
                raise UserError(f"sliding_window must be at least 1, not {window}")
        rotary_dim = self.rope.rotary_dim(self.head_dim)
        if rotary_dim < 2 or rotary_dim % 2:
            raise UserError(
                "head_dim * partial_rotary_factor must be even for rotary embeddings, "
                f"not {self.head_dim} * {self.rope.partial_rotary_factor}"
            )


# --- Hugging Face -------------------------------------------------------------------------------

# Keys that say nothing about the arithmetic of inference, as transformers and publishers write them.
INERT = (
    # provenance and storage
    "_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset",
    "attn_implementation", "auto_map", "dtype", "finetuning_task", "is_llama_config", "license",
    "model_name", "name_or_path", "prefix", "problem_type", "task_specific_params",
    "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_bfloat16",
    # training
    "attention_dropout", "attn_pdrop", "classifier_dropout", "embd_pdrop", "gradient_checkpointing",
    "hidden_dropout", "initializer_range", "resid_pdrop",
    # classes that put another head on
    "id2label", "label2id", "num_labels",
    # tokens that a decoder does not look at
    "decoder_start_token_id", "mask_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
    # what generate() does unless told, and what it returns; a request says so here
    "bad_words_ids", "begin_suppress_tokens", "cache_implementation", "chunk_size_feed_forward",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "is_decoder",
    "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "pruned_heads", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "suppress_tokens",
    "temperature", "top_k", "top_p", "typical_p", "use_cache",
)  # fmt: skip


def common_hf(
    fields: Fields,
    generation: Mapping[str, Any],
    *,
    max_positions: int = 2048,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    eps: float = 1e-6,
    tied: bool = False,
    quantization: str | None = None,
) -> dict[str, Any]:
    """What every family's ``config.json`` states, as arguments of ``ModelConfig``.

    The keyword arguments are the defaults of the family's configuration in transformers, which an
    absent field stands for: ``kv_heads`` None is as many as heads, ``head_dim`` None the hidden size
    over the heads. ``quantization`` is the ``quant_method`` that the family reads, if any.
    """
    fields.inert(*INERT)
    check_quantization(fields, quantization)
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads = fields.nullable(fields.integer, "num_key_value_heads", kv_heads)
    return {
        "architecture": fields.text("model_type"),
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": layer_count(fields, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_heads if kv_heads is None else kv_heads,
        "head_dim": fields.integer("head_dim", head_dim or hidden_size // max(num_heads, 1)),
        "rms_norm_eps": fields.number("rms_norm_eps", eps),
        "max_position_embeddings": fields.integer("max_position_embeddings", max_positions),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", tied),
        "bos_token_id": fields.integer("bos_token_id", None),
        "eos_token_ids": token_ids(
            (fields, "eos_token_id"),
            (Fields(generation, "generation_config.json: "), "eos_token_id"),
        ),
    }


def layer_count(fields: Fields, key: str) -> int:
    """The number of layers. It says how long lists become, so that an absurd one must end here."""
    count: int = fields.integer(key)
    if count > MOST_LAYERS:
        raise UserError(f"{fields.where}{key} must be at most {MOST_LAYERS}, not {count}")
    return count


def check_quantization(fields: Fields, served: str | None = None) -> None:
    """Raise UserError for quantised safetensors, unless ``served`` is their ``quant_method``."""
    options = fields.mapping("quantization_config", None)
    if options is None:
        return
    method = options.get("quant_method")
    if served is None or method != served:
        known = "" if served is None else f" (served: {served})"
        raise UserError(
            f"{fields.where}quantization_config with quant_method={method!r} is not served{known}; "
            "take the repository whose weights are not quantised"
        )
    inner = Fields(options, f"{fields.where}quantization_config.")
    inner.inert("quant_method", "modules_to_not_convert", "dequantize")
    inner.finish()


def layer_windows(
    fields: Fields, window: int | None, default: Collection[str]
) -> tuple[int | None, ...]:
    """``windows`` for ``layer_types``, or for ``default`` where the file has none.

    Layers are ``full_attention`` or ``sliding_attention``. Raises UserError for other kinds.
    """
    kinds = fields.sequence("layer_types", default)
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(
            f"{fields.where}layer_types={unknown} is not served (served: full_attention, "
            "sliding_attention)"
        )
    if len(kinds) != len(default):
        raise UserError(
            f"{fields.where}layer_types are {len(kinds)}, but num_hidden_layers is {len(default)}"
        )
    if "sliding_attention" not in kinds:
        return ()
    if window is None:
        raise UserError(f"{fields.where}layer_types has sliding layers, but sliding_window is null")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def token_ids(*keys: tuple[Fields, str]) -> tuple[int, ...]:
    """The tokens that these fields name, each an integer or a list of them, without repetition."""
    found: list[int] = []
    for fields, key in keys:
        value = fields.get(key, [])
        tokens = value if isinstance(value, list | tuple) else [value]
        if not all(map(is_integer, tokens)):
            raise UserError(f"{fields.where}{key} must be an integer or a list of them")
        found += tokens
    return tuple(dict.fromkeys(found))


# --- GGUF ---------------------------------------------------------------------------------------


class GGUFHeader(NamedTuple):
    """What a GGUF file says beside the fields of its architecture.

    ``metadata`` are all its fields as Python values, arrays as lists; ``tensors`` the names of its
    tensors; ``rope_factors`` the tensor ``rope_freqs.weight``, float32 ``[D/2]``, if there is one.
    """

    metadata: Mapping[str, Any]
    tensors: Collection[str]
    rope_factors: np.ndarray | None = None


def common_gguf(fields: Fields, header: GGUFHeader) -> dict[str, Any]:
    """What every architecture's metadata states, as arguments of ``ModelConfig``.

    GGUF writes neither tying nor biases down: both follow from the tensors.
    """
    fields.serve_only("expert_count", None, 0)  # how a dense model may say that it is one
    fields.serve_only("expert_used_count", None, 0)
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise UserError(
                f"{fields.where}{key} {fields.get(key)} differs from the head width {head_dim}"
            )
    context_length = fields.integer("context_length")
    tokenizer = Fields(header.metadata, "GGUF: ")
    tokens = tokenizer.sequence("tokenizer.ggml.tokens", ())
    return {
        "architecture": tokenizer.text("general.architecture"),
        "vocab_size": fields.integer("vocab_size", len(tokens)),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_layers": layer_count(fields, "block_count"),
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest_float32(fields.number("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": context_length,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "rope": RopeConfig.from_gguf(fields, context_length, header.rope_factors),
        "bos_token_id": tokenizer.integer("tokenizer.ggml.bos_token_id", None),
        "eos_token_ids": token_ids(
            *((tokenizer, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
        ),
    }


def _shortest_float32(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))
