"""Qwen3 (dense): Llama with a norm on each head's query and key, and a head width of its own."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from gkv_jax.models.config import ModelConfig
from gkv_jax.models.fields import Fields
from gkv_jax.models.layers import rms_norm
from gkv_jax.models.llama import Llama
from gkv_jax.models.parameters import Parameter, module
from gkv_jax.models.protocol import Params
from gkv_jax.models.qwen2 import qwen_from_hf
from gkv_jax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Qwen3(Llama):
    """A layer has ``q_norm [D]`` and ``k_norm [D]`` besides what Llama's has."""

    MODEL_TYPES = ("qwen3",)
    ARCHITECTURES = ("Qwen3ForCausalLM",)
    GGUF_ARCHITECTURES = ("qwen3",)
    FITS_FLOAT16 = False  # as Qwen2's, until measured

    checkpoint = Transformer.checkpoint  # llama.cpp leaves the rows of q and k as they are

    @classmethod
    def config_from_hf(cls, fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
        common = qwen_from_hf(fields, generation, head_dim=128)
        return ModelConfig(**common, attention_bias=fields.flag("attention_bias"))

    def layer_parameters(self, layer: int) -> Iterator[Parameter]:
        yield from super().layer_parameters(layer)
        for name in ("q_norm", "k_norm"):
            yield from module(layer, name, f"self_attn.{name}", f"attn_{name}", (self.head_dim,))

    def qkv(self, layer: Params, x: jax.Array) -> Sequence[jax.Array]:
        q, k, v = super().qkv(layer, x)
        eps = self.config.rms_norm_eps
        return rms_norm(q, layer["q_norm"], eps), rms_norm(k, layer["k_norm"], eps), v
