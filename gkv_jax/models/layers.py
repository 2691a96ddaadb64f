"""Arithmetic that families share."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from gkv_jax.models.protocol import Params
from pallas_kernels.int8_matmul import Int8Matrix, int8_matmul


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm (arXiv 1910.07467) of the last axis, in float32; ``weight`` multiplies in x's dtype."""
    return _last_axis(weight, x.ndim) * _normal(x, eps).astype(x.dtype)


def rms_norm_float32(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """As ``rms_norm``, but ``weight`` multiplies in float32, before the result takes x's dtype."""
    weight = _last_axis(weight.astype(jnp.float32), x.ndim)
    return (weight * _normal(x, eps)).astype(x.dtype)


def _normal(x: jax.Array, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)


def linear(layer: Params, name: str, x: jax.Array) -> jax.Array:
    """``x [..., in]`` times ``layer[name] [in, out]``, plus its bias, if it has one."""
    return _add_bias(layer, name, product(x, layer[name]))


def linears(
    layer: Params, fused: str, names: Sequence[str], x: jax.Array, widths: Sequence[int]
) -> Sequence[jax.Array]:
    """Linear maps ``names`` of ``x``, of these output widths, in one product where they are fused."""
    if fused not in layer:
        return [linear(layer, name, x) for name in names]
    ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
    parts = jnp.split(product(x, layer[fused]), ends, axis=-1)
    return [_add_bias(layer, name, part) for name, part in zip(names, parts, strict=True)]


def product(x: jax.Array, weight: jax.Array | Int8Matrix) -> jax.Array:
    """``x [..., in]`` times a matrix ``[in, out]``, or an int8 one."""
    if isinstance(weight, Int8Matrix):
        return int8_matmul(x, weight).astype(x.dtype)
    return x @ weight


def _add_bias(layer: Params, name: str, y: jax.Array) -> jax.Array:
    bias = layer.get(f"{name}_bias")
    return y if bias is None else y + _last_axis(bias, y.ndim)


def _last_axis(vector: jax.Array, ndim: int) -> jax.Array:
    return vector.reshape((1,) * (ndim - 1) + (-1,))
