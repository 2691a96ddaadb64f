"""Quest's page scores: how much a query could attend to any key of a page (arXiv 2406.10774).

A page of keys is summed up by the smallest and largest value in each channel. No key of the page can
have a larger product with the query than the box between them allows::

    score = Σ_d max(q_d · low_d, q_d · high_d) = relu(q) · high + min(q, 0) · low

In plain XLA, two products: see ``docs/kernels.md`` for why there is no kernel.
"""

import jax
import jax.numpy as jnp


def page_bounds(k: jax.Array, page: int) -> tuple[jax.Array, jax.Array]:
    """Smallest and largest value of each channel of each page.

    ``k`` is ``[B,Hk,C,D]`` with C a multiple of ``page``; results ``[B,Hk,C/page,D]``, of its dtype.
    Empty slots count: a page with some is bounded by what lies there too, which is never less.
    """
    pages = k.reshape(*k.shape[:2], -1, page, k.shape[3])
    return pages.min(axis=3), pages.max(axis=3)


def page_scores(q: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Upper bounds of the products with any key of a page: float32 ``[B,N,Hq,P]``.

    Args:
      q: rotated queries ``[B,N,Hq,D]``.
      low: ``[B,Hk,P,D]`` from ``page_bounds`` of rotated keys, in the dtype of ``q``.
      high: likewise.
    """
    batch, n, heads, dim = q.shape
    grouped = q.reshape(batch, n, low.shape[1], -1, dim)
    product = "bnhgd,bhpd->bnhgp"
    zero = jnp.zeros((), q.dtype)
    scores = jnp.einsum(
        product, jnp.maximum(grouped, zero), high, preferred_element_type=jnp.float32
    ) + jnp.einsum(product, jnp.minimum(grouped, zero), low, preferred_element_type=jnp.float32)
    return scores.reshape(batch, n, heads, -1)
