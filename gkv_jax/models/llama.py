"""The Llama architecture: Llama 2 and 3, SmolLM2, TinyLlama and everything saved as ``llama``.

A layer of its parameters::

    attn_norm [Dm]   q [Dm, Hq·D]   k, v [Dm, Hk·D]   o [Hq·D, Dm]
    mlp_norm [Dm]    gate, up [Dm, F]   down [F, Dm]
    and ``<name>_bias [out]`` beside a linear weight, where the model has them
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from gkv_jax.models.config import GGUFHeader, ModelConfig, common_gguf, common_hf
from gkv_jax.models.fields import Fields
from gkv_jax.models.layers import linear, linears, rms_norm
from gkv_jax.models.parameters import Changed, Naming, Parameter, module
from gkv_jax.models.protocol import Attend, Params
from gkv_jax.models.rope_config import RopeConfig
from gkv_jax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Llama(Transformer):
    """Pre-norm, SiLU-gated, rotary, grouped queries; biases where the configuration has them."""

    MODEL_TYPES = ("llama",)
    ARCHITECTURES = ("LlamaForCausalLM",)
    GGUF_ARCHITECTURES: ClassVar[tuple[str, ...]] = ("llama",)
    FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}  # noqa: RUF012

    @classmethod
    def config_from_hf(cls, fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
        fields.serve_only("hidden_act", None, "silu", "swish")
        fields.serve_only("pretraining_tp", None, 1)
        common = common_hf(fields, generation)
        return ModelConfig(
            **common,
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            rope=RopeConfig.from_hf(fields, common["max_position_embeddings"]),
        )

    @classmethod
    def config_from_gguf(cls, fields: Fields, header: GGUFHeader) -> ModelConfig:
        fields.serve_only("tensor_data_layout", None, "Meta AI original pth")
        return ModelConfig(**common_gguf(fields, header))

    @property
    def biased(self) -> tuple[str, ...]:
        """The linear weights that have a bias."""
        attention = ("q", "k", "v", "o") if self.config.attention_bias else ()
        return attention + (("gate", "up", "down") if self.config.mlp_bias else ())

    def layer_parameters(self, layer: int) -> Iterator[Parameter]:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        for name, huggingface, gguf, shape in (
            ("attn_norm", "input_layernorm", "attn_norm", (hidden,)),
            ("q", "self_attn.q_proj", "attn_q", (queries, hidden)),
            ("k", "self_attn.k_proj", "attn_k", (keys, hidden)),
            ("v", "self_attn.v_proj", "attn_v", (keys, hidden)),
            ("o", "self_attn.o_proj", "attn_output", (hidden, queries)),
            ("mlp_norm", "post_attention_layernorm", "ffn_norm", (hidden,)),
            ("gate", "mlp.gate_proj", "ffn_gate", (inner, hidden)),
            ("up", "mlp.up_proj", "ffn_up", (inner, hidden)),
            ("down", "mlp.down_proj", "ffn_down", (hidden, inner)),
        ):
            yield from module(layer, name, huggingface, gguf, shape, name in self.biased)

    def checkpoint(
        self, tensors: Mapping[str, np.ndarray], naming: Naming
    ) -> Mapping[str, np.ndarray]:
        """llama.cpp's converter reorders the rows of q and k of this architecture, and of no other."""
        return Changed(tensors, self._in_head_order) if naming == "gguf" else tensors

    def hidden(self, params: Params, tokens: jax.Array, attend: Attend) -> jax.Array:
        """Tokens ``[B,N]`` int32 to final hidden states ``[B,N,Dm]``, normalised."""
        eps = self.config.rms_norm_eps
        x = params["embed"][tokens]
        for index, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer{index}"):  # so that profiles and schedules can be read
                q, k, v = self.qkv(layer, rms_norm(x, layer["attn_norm"], eps))
                out = attend(index, q, k, v)
                x = x + linear(layer, "o", out.reshape(*x.shape[:2], -1))
                x = x + self._mlp(layer, rms_norm(x, layer["mlp_norm"], eps))
        return rms_norm(x, params["norm"], eps)

    def _mlp(self, layer: Params, x: jax.Array) -> jax.Array:
        widths = [self.config.intermediate_size] * 2
        gate, up = linears(layer, "gate_up", self.FUSED["gate_up"], x, widths)
        return linear(layer, "down", jax.nn.silu(gate) * up)

    def _in_head_order(self, name: str, array: np.ndarray) -> np.ndarray:
        heads = {"attn_q": self.num_heads, "attn_k": self.num_kv_heads}.get(name.split(".")[-2])
        if heads is None or array.shape[0] != heads * self.head_dim:  # its shape is refused later
            return array
        return unpermute_rows(array, heads)


def unpermute_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of ``attn_q`` and ``attn_k``: ``[heads * D, ...]`` float32.

    Its converter interleaves the two halves of each head, (0, D/2, 1, D/2 + 1, ...), because its
    rotary embedding turns neighbouring rows; Hugging Face's turns row i with row i + D/2.
    """
    rows, *rest = array.shape
    pairs = rows // heads // 2
    halves = array.reshape(heads, pairs, 2, *rest).swapaxes(1, 2)
    return np.ascontiguousarray(halves, dtype=np.float32).reshape(rows, *rest)
