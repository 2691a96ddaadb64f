"""Quest: keep everything, read the pages that a query may attend to (arXiv 2406.10774).

A page of keys is summed up by the smallest and largest value in each channel. No key of the page can
have a larger product with the query than the box between them allows::

    score = Σ_d max(q_d · low_d, q_d · high_d) = relu(q) · high + min(q, 0) · low

The first page (sinks) and the last ones are read in any case: so many that a page which a step's drafts
touch is among them for every query of the step. The others compete. The scores of a KV head's query
heads are averaged after a softmax over the pages that compete, so that each head has the same say and
no draft has any. Prompts are read with full attention, and so are the first two layers in decoding, as
in the paper.

In plain XLA, a product and a gather: see ``docs/kernels.md`` for why there is no kernel.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from gkv_jax.cache import offload
from gkv_jax.cache.segments import EMPTY, LayerCache
from gkv_jax.cache.spec import CacheSpec
from gkv_jax.cache.storage import Stored, load
from pallas_kernels.decode_attention import Attended


def page_bounds(k: jax.Array, page: int) -> jax.Array:
    """Smallest, then largest value of each channel of each page: ``[B,Hk,C/page,2·D]``, as ``k``.

    ``k`` is ``[B,Hk,C,D]`` with C a multiple of ``page``. Empty slots count: a page with some is bounded
    by what lies there too, which is never less.
    """
    pages = k.reshape(*k.shape[:2], -1, page, k.shape[3])
    return jnp.concatenate([pages.min(axis=3), pages.max(axis=3)], axis=-1)


def page_scores(q: jax.Array, bounds: jax.Array) -> jax.Array:
    """Upper bounds of the products with any key of a page: float32 ``[B,N,Hq,P]``.

    Args:
      q: rotated queries ``[B,N,Hq,D]``.
      bounds: ``[B,Hk,P,2·D]`` from ``page_bounds`` of rotated keys, in the dtype of ``q``.
    """
    batch, n, heads, _ = q.shape
    zero = jnp.zeros((), q.dtype)
    signs = jnp.concatenate([jnp.minimum(q, zero), jnp.maximum(q, zero)], axis=-1)
    grouped = signs.reshape(batch, n, bounds.shape[1], -1, bounds.shape[3])
    scores = jnp.einsum("bnhgd,bhpd->bnhgp", grouped, bounds, preferred_element_type=jnp.float32)
    return scores.reshape(batch, n, heads, -1)


def refresh(
    spec: CacheSpec, layer: LayerCache, rows: jax.Array, first: jax.Array, count: int
) -> LayerCache:
    """The layer with the bounds of ``count`` pages from ``first`` (int32 ``[b]``) on, in ``rows [b]``.

    Pages that do not exist are left out.
    """
    assert layer.bounds is not None
    heads, last = layer.bounds.shape[1:3]
    pages = first[:, None, None] + jnp.arange(count)[None, None, :]
    pages = jnp.where(pages < last, pages, EMPTY)
    pages = jnp.broadcast_to(pages, (len(rows), heads, count))
    return _with_bounds(spec, layer, rows, pages, _fetch(spec, layer.k, rows, pages))


def choose_pages(
    spec: CacheSpec, layer: LayerCache, q: jax.Array, positions: jax.Array, scale: float
) -> jax.Array:
    """The pages that each query reads: int32 ``[B,N,Hk,K]`` with ``K = budget / page`` or all pages.

    Those that are read in any case come first: the first page and the ``pinned_pages`` last ones, or all
    where there are no more. Then come the others by rank, then ``EMPTY``.

    Args:
      spec, layer: the layer's; only its bounds are read.
      q: rotated queries ``[B,N,Hq,D]``.
      positions: theirs, int32 ``[B,N]``.
      scale: factor on the products in attention.
    """
    assert layer.bounds is not None
    bounds, (batch, n) = layer.bounds.astype(q.dtype), positions.shape
    heads, count = bounds.shape[1:3]
    pages = jnp.arange(count)[None, None, None, :]
    own = (positions // spec.page)[:, :, None, None]
    competes = (pages > 0) & (pages <= own - spec.pinned_pages)
    scores = jnp.where(competes, page_scores(q, bounds) * scale, jnp.finfo(jnp.float32).min)
    shares = jax.nn.softmax(scores, axis=-1).reshape(batch, n, heads, -1, count)
    ranked = jnp.where(competes, shares.mean(axis=3), jnp.where(pages <= own, jnp.inf, -jnp.inf))
    value, index = jax.lax.top_k(ranked, min(spec.budget // spec.page, count))
    return jnp.where(value > -jnp.inf, index, EMPTY)


def read_pages(
    spec: CacheSpec,
    layer: LayerCache,
    q: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    kernel: Callable[..., Attended],
) -> tuple[Attended, LayerCache]:
    """Attention of ``q [B,N,Hq,D]`` at ``positions [B,N]``, each query over the pages it chooses.

    ``layer`` holds the tokens at these positions. Returned with the bounds of their pages. While some
    of these tokens are drafts, no query depends on the bounds: their pages are read in any case. A page
    on which queries depend has been full of accepted tokens since the step that wrote its last one.

    Args:
      spec: the layer's.
      layer: with this step's tokens.
      q, positions, scale: as in ``choose_pages``.
      kernel: ``decode_attention`` with the layer's options, ``scale`` among them.
    """
    batch, n, heads, dim = q.shape
    pages = choose_pages(spec, layer, q, positions, scale)
    pages = pages.reshape(batch * n, *pages.shape[2:])
    rows = jnp.repeat(jnp.arange(batch), n)
    k, v = _fetch(spec, layer.k, rows, pages), _fetch(spec, layer.v, rows, pages)
    held = pages[..., None] * spec.page + jnp.arange(spec.page)[None, None, None, :]
    held = jnp.where(pages[..., None] >= 0, held, EMPTY).reshape(k.data.shape[:3])
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
    # The last query's pinned pages are those that the step wrote, and some that are as they were.
    pinned = 1 + spec.pinned_pages
    last_k = jax.tree.map(lambda leaf: leaf[n - 1 :: n, :, : pinned * spec.page], k)
    after = _with_bounds(spec, layer, jnp.arange(batch), pages[n - 1 :: n, :, :pinned], last_k)
    return attended._replace(out=attended.out.reshape(q.shape)), after


def _fetch(spec: CacheSpec, stored: Stored, rows: jax.Array, pages: jax.Array) -> Stored:
    """Tokens ``[b,Hk,M·page,D]`` of ``pages [b,Hk,M]``; anything for ``EMPTY``."""
    return offload.fetch(stored, rows, jnp.maximum(pages, 0), spec.page)


def _with_bounds(
    spec: CacheSpec, layer: LayerCache, rows: jax.Array, pages: jax.Array, k: Stored
) -> LayerCache:
    """With the bounds of ``pages [b,Hk,M]`` of ``rows [b]``, whose keys ``k [b,Hk,M·page,D]`` are."""
    assert layer.bounds is not None
    bounds = page_bounds(load(k, None, layer.bounds.dtype), spec.page)
    target = jnp.where(pages >= 0, pages, layer.bounds.shape[2])  # dropped
    row, head = rows[:, None, None], jnp.arange(pages.shape[1])[None, :, None]
    after = layer.bounds.at[row, head, target].set(bounds, mode="drop")
    return dataclasses.replace(layer, bounds=after)
