"""Quest: keep everything, read the pages that a query may attend to (arXiv 2406.10774).

A page of keys is summed up by the smallest and largest value in each channel. No key of the page can
have a larger product with the query than the box between them allows::

    score = Σ_d max(q_d · low_d, q_d · high_d) = relu(q) · high + min(q, 0) · low

The scores of a KV head's query heads are averaged after a softmax over the pages, so that each head
has the same say. The first page (sinks) and the last ones are read in any case: so many that the pages
which a step's drafts touch are among them, and the output does not depend on drafts. Prompts are read
with full attention, and so are the first two layers in decoding, as in the paper.

In plain XLA, two products and a gather: see ``docs/kernels.md`` for why there is no kernel.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gkv_jax.cache.segments import EMPTY, LayerCache
from gkv_jax.cache.spec import CacheSpec
from gkv_jax.cache.storage import Stored, load
from pallas_kernels.decode_attention import Attended


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


def refresh(
    spec: CacheSpec, layer: LayerCache, rows: jax.Array, first: jax.Array, count: int
) -> LayerCache:
    """Bounds of ``count`` pages from page ``first`` (int32 ``[b]``) on, in ``rows [b]``.

    Pages that do not exist are left out. A page with tokens that are not verified yet is refreshed
    again before any query depends on its bounds.
    """
    assert layer.bounds is not None
    last = spec.capacity // spec.page
    pages = first[:, None] + jnp.arange(count)[None, :]
    exists = (pages >= 0) & (pages < last)
    keys = _pages(layer.k, rows, jnp.clip(pages, 0, last - 1), spec.page)
    keys = keys.astype(layer.bounds.dtype)
    bounds = jnp.stack([keys.min(axis=3), keys.max(axis=3)])  # [2,b,Hk,count,D]
    target = jnp.where(exists, pages, last)[:, None, :]
    at = (rows[:, None, None], jnp.arange(keys.shape[1])[None, :, None], target)
    new = layer.bounds
    for side in range(2):
        new = new.at[(side, *at)].set(bounds[side], mode="drop")
    return dataclasses.replace(layer, bounds=new)


def refresh_step(spec: CacheSpec, layer: LayerCache, positions: jax.Array) -> LayerCache:
    """Bounds of the pages that tokens before ``positions [B,N]`` may have completed since."""
    count = 1 + -(-spec.queries // spec.page)
    first = (positions[:, 0] - 1) // spec.page - (count - 1)
    return refresh(spec, layer, jnp.arange(positions.shape[0]), first, count)


def choose_pages(
    spec: CacheSpec, layer: LayerCache, q: jax.Array, positions: jax.Array
) -> jax.Array:
    """The pages that each query reads: int32 ``[B,N,Hk,budget/page]``, ``EMPTY`` where fewer exist.

    ``q`` is ``[B,N,Hq,D]``, rotated, at ``positions [B,N]``.
    """
    assert layer.bounds is not None
    low, high = layer.bounds[0].astype(q.dtype), layer.bounds[1].astype(q.dtype)
    batch, n, _, dim = q.shape
    pages = jnp.arange(low.shape[2])[None, None, None, :]
    own = (positions // spec.page)[:, :, None, None]
    exists = pages <= own
    scores = jnp.where(exists, page_scores(q, low, high) * dim**-0.5, -jnp.inf)
    shares = jax.nn.softmax(scores, axis=-1).reshape(batch, n, low.shape[1], -1, low.shape[2])
    by_head = shares.mean(axis=3)
    pinned = exists & ((pages == 0) | (pages > own - spec.pinned_pages))
    ranked = jnp.where(pinned, jnp.inf, jnp.where(exists, by_head, -jnp.inf))
    count = min(spec.budget // spec.page, low.shape[2])
    value, index = jax.lax.top_k(ranked, count)
    return jnp.where(value > -jnp.inf, index, EMPTY)


def gather(
    spec: CacheSpec, layer: LayerCache, pages: jax.Array
) -> tuple[Stored, Stored, jax.Array]:
    """Keys and values ``[B·N,Hk,budget,D]`` of ``pages [B,N,Hk,K]``, and the positions they hold."""
    batch, n, heads, count = pages.shape
    flat = pages.reshape(batch * n, heads, count)
    rows = jnp.repeat(jnp.arange(batch), n)
    offsets = jnp.arange(spec.page)[None, None, None, :]
    held = jnp.where(flat[..., None] >= 0, flat[..., None] * spec.page + offsets, EMPTY)
    slots = jnp.maximum(held, 0).reshape(batch * n, heads, -1)
    at = (rows[:, None, None], jnp.arange(heads)[None, :, None], slots)

    def take(stored: Stored) -> Stored:
        return jax.tree.map(lambda buffer: buffer[at], stored)

    return take(layer.k), take(layer.v), held.reshape(batch * n, heads, -1)


def read_pages(
    spec: CacheSpec,
    layer: LayerCache,
    q: jax.Array,
    positions: jax.Array,
    kernel: Callable[..., Attended],
) -> Attended:
    """Attention of ``q [B,N,Hq,D]`` at ``positions [B,N]``, each query over the pages it chooses.

    ``kernel`` is ``decode_attention`` with the layer's options.
    """
    batch, n, heads, dim = q.shape
    k, v, held = gather(spec, layer, choose_pages(spec, layer, q, positions))
    attended = kernel(
        (q.reshape(batch * n, 1, heads, dim),),
        k.data,
        v.data,
        held,
        positions.reshape(-1, 1),
        prefix=0,
        window=spec.capacity,
        k_scale=k.scale,
        v_scale=v.scale,
    )
    return attended._replace(out=attended.out.reshape(q.shape))


def _pages(stored: Stored, rows: jax.Array, pages: jax.Array, page: int) -> jax.Array:
    """Keys ``[b,Hk,M,page,D]`` of ``pages [b,M]`` in ``rows [b]``, float32."""
    heads = stored.data.shape[1]
    slots = (pages[:, :, None] * page + jnp.arange(page)[None, None, :]).reshape(len(pages), 1, -1)
    at = (rows[:, None, None], jnp.arange(heads)[None, :, None], slots)
    tokens = load(jax.tree.map(lambda buffer: buffer[at], stored), None, jnp.float32)
    return tokens.reshape(*tokens.shape[:2], -1, page, tokens.shape[3])
