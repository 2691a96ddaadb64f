"""The LM head as a plain product."""

import jax
import jax.numpy as jnp
from jax import lax


def project(hidden: jax.Array, head: jax.Array) -> jax.Array:
    """float32 logits `[...,S]` of `hidden [...,Dm]` and rows `head [S,Dm]`, of the same dtype."""
    # By default TPUs and GPUs multiply float32 in fewer bits than the kernels do.
    precision = lax.Precision.HIGHEST if head.dtype == jnp.float32 else None
    return jnp.einsum(
        "...d,vd->...v", hidden, head, precision=precision, preferred_element_type=jnp.float32
    )
