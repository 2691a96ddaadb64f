"""The LM head as a plain product."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.int8_matmul import Int8Matrix, int8_matmul

Head = jax.Array | Int8Matrix
"""The LM head `[V,Dm]`; the embedding, where it is tied."""


def project(hidden: jax.Array, head: Head) -> jax.Array:
    """float32 logits `[...,S]` of `hidden [...,Dm]` and rows `head [S,Dm]`, of the same dtype."""
    if isinstance(head, Int8Matrix):
        return int8_matmul(hidden, head)
    # By default TPUs and GPUs multiply float32 in fewer bits than the kernels do.
    precision = lax.Precision.HIGHEST if head.dtype == jnp.float32 else None
    return jnp.einsum(
        "...d,vd->...v", hidden, head, precision=precision, preferred_element_type=jnp.float32
    )
