"""What the decode loop needs from a model, and what the model may ask of its surroundings."""

import dataclasses
from typing import Any, Protocol

import jax

from gkv_jax.rope import Rope
from pallas_kernels.masked_head import Head

Params = Any
"""A pytree of arrays; its layout belongs to the model."""


@dataclasses.dataclass(frozen=True)
class AttentionLayer:
    """What the cache must know of one attention layer.

    Attributes:
      rope: its rotation; None where keys and queries come as the model wants them: rotated by its own
        code already, or never.
      window: positions that a query sees, itself included (``j > i - window``); None for all.
    """

    rope: Rope | None
    window: int | None = None

    def rotary_dim(self, head_dim: int) -> int:
        """Channels of a head, its first, that ``rope`` turns; 0 without one."""
        return 0 if self.rope is None else self.rope.config.rotary_dim(head_dim)


class Attend(Protocol):
    """Attention as the model asks for it.

    Whoever calls the model supplies it. Positions, masks and caches live behind this function, so
    the same model code trains, prefills, streams through a ring and is scored by SnapKV.

    Attributes:
      positions: true position of each token in its text, int32 ``[B,N]``, for models that need it outside
        attention (learned positions), or that rotate keys themselves (``AttentionLayer.rope`` None).
    """

    @property
    def positions(self) -> jax.Array: ...

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attend from ``q [B,N,Hq,D]`` to ``k``, ``v`` ``[B,N,Hk,D]`` and what came before them.

        Args:
          layer: index of the layer.
          q, k, v: before rotation, unless the layer has none.
          scale: factor on the products; None for ``D ** -0.5``.
          soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` (Gemma 2).
          sinks: learned sink logits, float32 ``[Hq]``: one more key without a value (gpt-oss).

        Returns:
          ``[B,N,Hq,D]`` in the dtype of ``q``.
        """
        ...


class Decoder(Protocol):
    """A decoder-only transformer as pure functions. Hashable: it is a static argument of the loop."""

    @property
    def vocab_size(self) -> int:
        """Width V of the logits, which may exceed the tokenizer's length."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int:
        """Query heads."""
        ...

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_positions(self) -> int:
        """Positions the model was trained for."""

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """The attention layers, ``num_layers`` of them."""
        ...

    def hidden(self, params: Params, tokens: jax.Array, attend: Attend) -> jax.Array:
        """Tokens ``[B,N]`` int32 to final hidden states ``[B,N,Dm]``, normalised."""
        ...

    def head(self, params: Params) -> Head:
        """The LM head ``[V,Dm]``: the embedding, where the two are tied; or an ``Int8Matrix``.

        Decoding samples from ``hidden @ head.T`` and calls ``logits`` nowhere.
        """
        ...

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Hidden states ``[..., Dm]`` to float32 logits ``[..., V]``, for evaluation."""
        ...
