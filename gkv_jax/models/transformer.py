"""What the families of models have in common; ``docs/models.md`` says how to add one."""

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gkv_jax.models.config import GGUFHeader, ModelConfig
from gkv_jax.models.fields import Fields
from gkv_jax.models.layers import linears
from gkv_jax.models.parameters import Naming, Parameter
from gkv_jax.models.protocol import Attend, AttentionLayer, Params
from gkv_jax.rope import Rope
from pallas_kernels.int8_matmul import quantize
from pallas_kernels.masked_head import Head, project


@dataclasses.dataclass(frozen=True)
class Transformer(abc.ABC):
    """A ``Decoder`` whose checkpoints can be read. Its config is all that it holds.

    Parameters are a plain pytree, the layers unrolled, so that every layer's cache is updated in
    place and layers may differ. Linear weights are ``[in, out]``: XLA:CPU multiplies a batch of a
    few rows faster that way than with the checkpoint's ``[out, in]``::

        embed [V, Dm]   norm [Dm]   head [V, Dm] (absent when tied to embed)
        layers: a list of dicts; what is in them the family says in ``layer_parameters``
    """

    MODEL_TYPES: ClassVar[tuple[str, ...]]
    """Values of ``model_type`` in config.json."""
    ARCHITECTURES: ClassVar[tuple[str, ...]]
    """The class in transformers of each of ``MODEL_TYPES``."""
    GGUF_ARCHITECTURES: ClassVar[tuple[str, ...]] = ()
    """Values of ``general.architecture`` in GGUF files."""
    FITS_FLOAT16: ClassVar[bool] = True
    """Whether activations stay in float16's range; families trained in bfloat16 may leave it."""
    FUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Linear weights that read the same input; ``quantize`` makes one of them, called by the key."""

    config: ModelConfig

    @classmethod
    @abc.abstractmethod
    def config_from_hf(cls, fields: Fields, generation: Mapping[str, Any]) -> ModelConfig:
        """Read ``config.json``, and ``generation_config.json`` (empty if there is none).

        The caller finishes ``fields``. Raises UserError, naming the field, for what is not served.
        """

    @classmethod
    def config_from_gguf(cls, fields: Fields, header: GGUFHeader) -> ModelConfig:
        """Read GGUF metadata: ``fields`` are those of the architecture, without their prefix.

        The caller finishes ``fields``. Raises UserError, naming the key, for what is not served.
        """
        raise NotImplementedError  # without GGUF_ARCHITECTURES nobody calls it

    @abc.abstractmethod
    def layer_parameters(self, layer: int) -> Iterator[Parameter]:
        """The leaves of one layer."""

    @abc.abstractmethod
    def hidden(self, params: Params, tokens: jax.Array, attend: Attend) -> jax.Array:
        """Tokens ``[B,N]`` int32 to final hidden states ``[B,N,Dm]``, normalised."""

    def checkpoint(
        self, tensors: Mapping[str, np.ndarray], naming: Naming
    ) -> Mapping[str, np.ndarray]:
        """A checkpoint's tensors as ``parameters`` names and shapes them, made when looked up."""
        return tensors

    def parameters(self) -> Iterator[Parameter]:
        """Every leaf of the tree, in the order of the network."""
        config = self.config
        table, vector = (config.vocab_size, config.hidden_size), (config.hidden_size,)
        yield Parameter("embed", None, "model.embed_tokens.weight", "token_embd.weight", table)
        for layer in range(config.num_layers):
            yield from self.layer_parameters(layer)
        yield Parameter("norm", None, "model.norm.weight", "output_norm.weight", vector)
        if not config.tie_word_embeddings:
            yield Parameter("head", None, "lm_head.weight", "output.weight", table)

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
        rope = Rope(self.config.rope, self.config.head_dim)
        windows = self.config.windows or (None,) * self.num_layers
        return tuple(AttentionLayer(rope, window) for window in windows)

    def qkv(self, layer: Params, x: jax.Array) -> Sequence[jax.Array]:
        """Queries ``[B,N,Hq,D]``, keys and values ``[B,N,Hk,D]`` of normalised ``x [B,N,Dm]``."""
        widths = [heads * self.head_dim for heads in (self.num_heads, *[self.num_kv_heads] * 2)]
        projected = linears(layer, "qkv", ("q", "k", "v"), x, widths)
        return [y.reshape(*x.shape[:2], -1, self.head_dim) for y in projected]

    def head(self, params: Params) -> Head:
        """The LM head ``[V,Dm]``."""
        head: Head = params["head"] if "head" in params else params["embed"]
        return head

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Hidden states ``[..., Dm]`` to float32 logits ``[..., V]``."""
        head = self.head(params)
        return project(hidden.astype(head.dtype), head)

    def quantize(self, params: Params) -> Params:
        """The same parameters with int8 weights: linear ones and the head, tied or not.

        They become ``Int8Matrix``es, those that read the same input one (``FUSED``). The embedding,
        norms and biases stay as they are.
        """
        layers = []
        for index, layer in enumerate(params["layers"]):
            groups: dict[str, tuple[str, ...]] = {
                leaf.name: (leaf.name,) for leaf in self.layer_parameters(index) if leaf.linear
            }
            for fused, names in self.FUSED.items():
                for name in names:
                    del groups[name]
                groups[fused] = names
            rounded = {name for names in groups.values() for name in names}
            kept = {name: leaf for name, leaf in layer.items() if name not in rounded}
            layers.append(
                kept
                | {
                    group: quantize(jnp.concatenate([layer[name].T for name in names]))
                    for group, names in groups.items()
                }
            )
        name = "embed" if self.config.tie_word_embeddings else "head"
        return {**params, "layers": layers, "head": quantize(params[name])}
