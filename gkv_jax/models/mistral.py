"""Mistral: Llama whose layers see a window, in the first versions (7B v0.1).

llama.cpp stores it as architecture ``llama``, so that GGUF files of it are Llamas.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from gkv_jax.models.config import ModelConfig, common_hf
from gkv_jax.models.fields import Fields
from gkv_jax.models.llama import Llama
from gkv_jax.models.rope_config import RopeConfig


@dataclasses.dataclass(frozen=True)
class Mistral(Llama):
    """``sliding_window`` is the window of every layer; null, as later versions have it, is none."""

    MODEL_TYPES = ("mistral",)
    ARCHITECTURES = ("MistralForCausalLM",)
    GGUF_ARCHITECTURES = ()

    @classmethod
    def config_from_hf(cls, fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
        fields.serve_only("hidden_act", None, "silu")
        common = common_hf(fields, generation, max_positions=131072, kv_heads=8)
        window = fields.nullable(fields.integer, "sliding_window", 4096)
        return ModelConfig(
            **common,
            attention_bias=False,
            mlp_bias=False,
            rope=RopeConfig.from_hf(fields, common["max_position_embeddings"]),
            windows=(window,) * common["num_layers"] if window is not None else (),
        )
