"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; some layers may see a window only."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from gkv_jax.models.config import ModelConfig, common_hf, layer_windows
from gkv_jax.models.fields import Fields
from gkv_jax.models.llama import Llama
from gkv_jax.models.rope_config import RopeConfig
from gkv_jax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Qwen2(Llama):
    """``attention_bias`` stands for the biases of q, k and v; o has none."""

    MODEL_TYPES = ("qwen2",)
    ARCHITECTURES = ("Qwen2ForCausalLM",)
    GGUF_ARCHITECTURES = ("qwen2",)
    FITS_FLOAT16 = False  # published checkpoints are known to overflow

    checkpoint = Transformer.checkpoint  # llama.cpp leaves the rows of q and k as they are

    @classmethod
    def config_from_hf(cls, fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
        return ModelConfig(**qwen_from_hf(fields, generation), attention_bias=True)

    @property
    def biased(self) -> tuple[str, ...]:
        return ("q", "k", "v") if self.config.attention_bias else ()


def qwen_from_hf(
    fields: Fields, generation: Mapping[str, Any], head_dim: int | None = None
) -> dict[str, Any]:
    """What ``config.json`` of Qwen2 and Qwen3 have in common, as arguments of ``ModelConfig``.

    Where ``use_sliding_window`` is on and no ``layer_types`` are given, the layers from
    ``max_window_layers`` on have the window.
    """
    fields.serve_only("hidden_act", None, "silu")
    common = common_hf(fields, generation, max_positions=32768, kv_heads=32, head_dim=head_dim)
    window = fields.nullable(fields.integer, "sliding_window", 4096)
    first = fields.integer("max_window_layers", 28)
    if not fields.flag("use_sliding_window"):
        window = None
    kinds = [
        "sliding_attention" if window is not None and index >= first else "full_attention"
        for index in range(common["num_layers"])
    ]
    return common | {
        "mlp_bias": False,
        "rope": RopeConfig.from_hf(fields, common["max_position_embeddings"]),
        "windows": layer_windows(fields, window, kinds),
    }
