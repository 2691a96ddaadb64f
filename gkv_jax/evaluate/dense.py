"""Attention over a whole text at once, with nothing cached: what caches are compared with.

The reference of streaming is independent of the cache's attention, and slow: every score exists.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from gkv_jax.cache import CacheSpec, Layout
from gkv_jax.cache.prompt import PromptLayer
from gkv_jax.cache.rotation import Rotations
from gkv_jax.errors import UserError
from gkv_jax.evaluate.perplexity import target_nll
from gkv_jax.models.protocol import Decoder, Params
from gkv_jax.rope import Rope, inverse_frequencies, rotate

_QUERY_BLOCK = 32


def reference_nll(
    model: Decoder, params: Params, tokens: Sequence[int] | NDArray[np.integer], spec: CacheSpec
) -> NDArray[np.float64]:
    """What ``streaming_nll`` gives for a cache without scores, by the definition of StreamingLLM.

    Every query has its own mask (the sinks, and the window that ends in itself) and sees each key at
    the rank that it has among those (arXiv 2309.17453, section 3.2): keys are rotated once per query.
    Memory and time are quadratic in the text; a few hundred tokens are enough to compare.

    Args:
      model: the architecture.
      params: its parameters.
      tokens: the text, T token ids, T >= 2.
      spec: of policy ``window`` or ``full``.

    Returns:
      float64 ``[T-1]``, in nats: entry i is for ``tokens[i + 1]``.

    Raises:
      UserError: another policy.
    """
    if spec.policy not in ("window", "full"):
        raise UserError(f"cache.policy {spec.policy!r} has no reference; use 'window' or 'full'")
    text = np.asarray(tokens, np.int32)
    return np.asarray(_ranked_nll(params, jnp.asarray(text), model=model, spec=spec), np.float64)


@functools.partial(jax.jit, static_argnames=("model", "spec"))
def _ranked_nll(params: Params, text: jax.Array, *, model: Decoder, spec: CacheSpec) -> jax.Array:
    """float32 ``[T-1]`` of a text ``[T]``."""
    hidden = model.hidden(params, text[None, :-1], _RankedAttend(model, len(text) - 1, spec))
    return target_nll(params, hidden[0], text[1:], model=model)


class _RankedAttend:
    """``Attend`` for a text ``[1,L]`` whose queries see each key at its rank."""

    def __init__(self, model: Decoder, length: int, spec: CacheSpec) -> None:
        self._model, self._length, self._spec = model, length, spec
        self.positions = jnp.arange(length)[None]

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
        # Layers with a window of their own may see that instead, without sinks.
        spec = Layout.of(self._spec, self._model).spec(layer)
        kind = self._model.layers[layer]
        keys = jnp.arange(self._length)
        rope = kind.rope
        if rope is not None:
            tables = _angle_tables(rope, self._length)
            cos, sin = (jnp.asarray(table) for table in tables)

        def one(at: jax.Array) -> jax.Array:
            """The query at position ``at``: ``[Hq,D]``."""
            seen = (keys <= at) & ((keys < spec.sinks) | (keys > at - spec.window))
            # Rank among the seen; where a key is not seen the number does not matter.
            ranks = jnp.cumsum(seen) - 1
            if not spec.by_rank or rope is None:
                ranks = keys
            own = ranks[at]
            query, turned = q[0, at], k[0]
            if rope is not None:
                query = rotate(query, rope.for_queries((cos[own][None], sin[own][None])))
                turned = rotate(turned, (cos[ranks][:, None], sin[ranks][:, None]))
            out = attention(
                query[None],
                turned,
                v[0],
                seen[None],
                scale=scale,
                soft_cap=soft_cap,
                sinks=sinks,
            )
            return out[0]

        return jax.lax.map(one, keys, batch_size=_QUERY_BLOCK)[None]


@functools.lru_cache(maxsize=8)
def _angle_tables(rope: Rope, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine ``[length, d/2]`` float32, of angles in float64."""
    frequencies = inverse_frequencies(rope.config, rope.head_dim)
    angles = np.arange(length)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("model", "count"))
def attention_rows(
    params: Params, tokens: jax.Array, first: jax.Array, *, model: Decoder, count: int
) -> jax.Array:
    """Attention probabilities of ``count`` successive queries over the whole text before them.

    Args:
      params: the model's parameters.
      tokens: int32 ``[L]``; what lies after the last of the queries is padding.
      first: position of the first query, int32 scalar.
      model: static. count: static.

    Returns:
      float32 ``[num_layers,Hk,count,L]``, the mean over the query heads of each KV head.
    """
    attend = _RecordingAttend(model, tokens.shape[0], first, count)
    model.hidden(params, tokens[None], attend)
    return jnp.stack(attend.rows)


class _RecordingAttend:
    """``Attend`` for a text ``[1,L]`` that keeps the rows of some queries in ``rows``."""

    def __init__(self, model: Decoder, length: int, first: jax.Array, count: int) -> None:
        self._model, self.positions = model, jnp.arange(length)[None]
        self._rotations = Rotations(self.positions, [None])
        self._wanted = first + jnp.arange(count)
        self.rows: list[jax.Array] = []

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
        kind, length = self._model.layers[layer], self.positions.shape[1]
        rotation = self._rotations.of(0, kind.rope)
        (rotated_q,) = rotation.queries(q)
        text = PromptLayer(
            kind=kind,
            length=jnp.int32(length),
            q=q,
            rotated_q=rotated_q,
            k=k,
            rotated_k=rotation.keys(k),
            v=v,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            soft_cap=soft_cap,
            sinks=sinks,
        )
        _, rows = text.rows(self._wanted)
        self.rows.append(rows[0].swapaxes(0, 1))
        out, _ = text.attention(with_mass=False)
        return out


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    *,
    scale: float | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Softmax attention, written out: ``[n,Hq,D]`` in the dtype of ``q``.

    Args:
      q: rotated queries ``[n,Hq,D]``.
      k: rotated keys ``[L,Hk,D]``.
      v: values ``[L,Hk,D]``.
      seen: bool ``[n,L]``, some key for each query.
      scale, soft_cap, sinks: see ``Attend``.
    """
    n, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(n, kv_heads, -1, dim)
    scores = jnp.einsum("nhgd,lhd->nhgl", grouped, k, preferred_element_type=jnp.float32)
    scores *= dim**-0.5 if scale is None else scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[:, None, None, :], scores, -jnp.inf)
    if sinks is not None:
        extra = jnp.broadcast_to(sinks.reshape(1, kv_heads, -1, 1), (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, extra], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[0]]
    out = jnp.einsum("nhgl,lhd->nhgd", weights, v.astype(jnp.float32))
    return out.reshape(n, heads, dim).astype(q.dtype)
