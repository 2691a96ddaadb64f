"""What the decode loop needs from a model, and what the model may ask of its surroundings."""

from collections.abc import Callable
from typing import Any, Protocol

import jax

from gkv_jax.rope import Rope

Params = Any
"""A pytree of arrays; its layout belongs to the model."""

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
"""``attend(layer, q [B,N,Hq,D], k [B,N,Hk,D], v [B,N,Hk,D]) -> [B,N,Hq,D]``, all before rotation.

Whoever calls the model supplies it. Positions, masks and caches live behind this function, so the
same model code trains, prefills, streams through a ring and is scored by SnapKV.
"""


class Decoder(Protocol):
    """A decoder-only transformer as pure functions. Hashable: it is a static argument of the loop."""

    @property
    def vocab_size(self) -> int:
        """Width V of the logits, which may exceed the tokenizer's length."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_positions(self) -> int:
        """Positions the model was trained for."""

    @property
    def rope(self) -> Rope: ...

    def hidden(self, params: Params, tokens: jax.Array, attend: Attend) -> jax.Array:
        """Tokens ``[B,N]`` int32 to final hidden states ``[B,N,Dm]``, normalised."""
        ...

    def head(self, params: Params) -> jax.Array:
        """The LM head ``[V,Dm]``: the embedding, where the two are tied.

        Decoding samples from ``hidden @ head.T`` and calls ``logits`` nowhere.
        """
        ...

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Hidden states ``[..., Dm]`` to float32 logits ``[..., V]``, for evaluation."""
        ...
