"""The LM head as a plain product, and the forms in which models have it."""

import dataclasses
import functools
from typing import Union

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.int8_matmul import Int8Matrix, int8_matmul


@functools.partial(jax.tree_util.register_dataclass, data_fields=["head"], meta_fields=["cap"])
@dataclasses.dataclass(frozen=True)
class SoftCapped:
    """A head whose logits become `cap * tanh(logits / cap)` (Gemma 2, arXiv 2408.00118).

    Everything that reads logits sees the capped ones: temperature, filters, log-probabilities.

    Attributes:
      head: the head that multiplies.
      cap: the bound of the logits, above 0.
    """

    head: "Head"
    cap: float

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise ValueError(f"cap: must be above 0, got {self.cap}")

    @property
    def shape(self) -> tuple[int, ...]:
        """`(V, Dm)`."""
        return self.head.shape

    @property
    def dtype(self) -> DTypeLike:
        """Of the hidden states."""
        return self.head.dtype


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=[], meta_fields=["vocab_size", "dtype"]
)
@dataclasses.dataclass(frozen=True)
class GivenLogits:
    """The head of a model that gives logits itself: "hidden states" `[...,V]` are the logits.

    It multiplies like the identity. Nothing is saved where no row has a legal token.

    Attributes:
      vocab_size: V.
      dtype: of the model's logits.
    """

    vocab_size: int
    dtype: DTypeLike = jnp.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """`(V, V)`."""
        return self.vocab_size, self.vocab_size


Head = Union[jax.Array, Int8Matrix, SoftCapped, GivenLogits]  # noqa: UP007 (a name as a string)
"""The LM head `[V,Dm]`; the embedding, where it is tied."""


def project(hidden: jax.Array, head: Head) -> jax.Array:
    """float32 logits `[...,S]` of `hidden [...,Dm]` and rows `head [S,Dm]`, of the same dtype."""
    if isinstance(head, SoftCapped):
        return _cap(project(hidden, head.head), head.cap)
    if isinstance(head, GivenLogits):
        return hidden.astype(jnp.float32)
    if isinstance(head, Int8Matrix):
        return int8_matmul(hidden, head)
    # By default TPUs and GPUs multiply float32 in fewer bits than the kernels do.
    precision = lax.Precision.HIGHEST if head.dtype == jnp.float32 else None
    return jnp.einsum(
        "...d,vd->...v", hidden, head, precision=precision, preferred_element_type=jnp.float32
    )


def project_rows(hidden: jax.Array, head: Head, start: jax.Array, count: int) -> jax.Array:
    """Of the logits that `project` gives, `count` from `start` on, float32 `[...,count]`."""
    if isinstance(head, SoftCapped):
        return _cap(project_rows(hidden, head.head, start, count), head.cap)
    if isinstance(head, GivenLogits):
        return project(lax.dynamic_slice_in_dim(hidden, start, count, axis=-1), head)
    if isinstance(head, Int8Matrix):
        return project(hidden, head.rows(start, count))
    return project(hidden, lax.dynamic_slice_in_dim(head, start, count))


def _cap(logits: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(logits / cap)
