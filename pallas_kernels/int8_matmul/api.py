"""Matrices of int8 and their product, which XLA computes on every platform.

Weights are rounded once, to int8 with a scale for each output (as in LLM.int8(), arXiv 2208.07339).
Activations are not: each is written as the sum of two int8 numbers, the second for what the first
leaves over, so that 15 bits of it take part. A product of few rows is as fast as its weights can be
read, so the second half costs next to nothing in decoding.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

_MOST = 127.0
_LEAST = 1e-30
"""Rows of zeros need a scale, too."""
_FINER = 254.0
"""What the first int8 leaves over is at most half of a step."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["dtype"]
)
@dataclasses.dataclass(frozen=True)
class Int8Matrix:
    """A matrix ``[out, in]`` as int8.

    Attributes:
      values: int8 ``[out, in]``.
      scale: float32 ``[out]``; the matrix is ``values * scale[:, None]``.
      dtype: of the products.
    """

    values: jax.Array
    scale: jax.Array
    dtype: DTypeLike = jnp.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """``(out, in)``."""
        return self.values.shape

    def rows(self, start: jax.Array, count: int) -> "Int8Matrix":
        """``count`` rows from ``start`` on."""
        values, scale = (
            jax.lax.dynamic_slice_in_dim(array, start, count) for array in (self.values, self.scale)
        )
        return Int8Matrix(values, scale, self.dtype)


def quantize(matrix: jax.Array) -> Int8Matrix:
    """Round ``[out, in]`` to int8, each row by its largest weight; products keep the dtype."""
    wide = matrix.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(wide).max(axis=1), _LEAST) / _MOST
    values = jnp.round(wide / scale[:, None]).astype(jnp.int8)
    return Int8Matrix(values, scale, matrix.dtype)


def int8_matmul(x: jax.Array, matrix: Int8Matrix) -> jax.Array:
    """``x @ matrix.T`` for ``x [..., in]``: float32 ``[..., out]``.

    Raises:
      ValueError: the widths differ.
    """
    if x.shape[-1] != matrix.shape[1]:
        raise ValueError(f"x: must be [..., {matrix.shape[1]}], got {list(x.shape)}")
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    scale = jnp.maximum(jnp.abs(rows).max(axis=1, keepdims=True), _LEAST)
    scale = scale / _MOST
    coarse = jnp.round(rows / scale)
    fine = jnp.round((rows / scale - coarse) * _FINER)
    # Never a single row: XLA:CPU multiplies integer vectors in a plain loop.
    both = jnp.concatenate([coarse, fine]).astype(jnp.int8)
    products = jax.lax.dot_general(
        both, matrix.values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    ).astype(jnp.float32)
    count = rows.shape[0]
    total = products[:count] + products[count:] * (1 / _FINER)
    out = total * scale * matrix.scale[None, :]
    return out.reshape(*x.shape[:-1], matrix.shape[0])
