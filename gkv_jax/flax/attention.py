"""Attention as training asks for it, and what stands in for Flax's ``attention_fn``."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from gkv_jax.cache.rotation import Rotations
from gkv_jax.errors import UserError
from gkv_jax.models.protocol import Attend, AttentionLayer

INSIDE = (
    "model: attention is called inside of the model's own jit, remat, scan or vmap, from where a cache "
    "cannot be carried out; build the model for generation with these off (its weights are the same), "
    "layers as a list in place of a scan"
)


class CausalAttend:
    """``Attend`` for whole texts ``[B,N]``, with nothing cached: what training uses.

    Differentiable. The scores of a layer, ``[B,Hq,N,N]`` float32, are computed again in the backward pass
    unless ``remat`` is False.
    """

    def __init__(
        self,
        layers: tuple[AttentionLayer, ...],
        shape: tuple[int, int],
        *,
        mask: jax.Array | None = None,
        remat: bool = True,
    ) -> None:
        """``shape`` is that of the tokens, ``(B, N)``; ``mask`` bool ``[B,N]`` says which of them exist.

        Positions count those that exist, so that a text may be padded on either side. What the others
        see, and what becomes of them, has no meaning.
        """
        self._layers, self._remat = layers, remat
        self._real = jnp.ones(shape, bool) if mask is None else mask
        count = jnp.cumsum(self._real.astype(jnp.int32), axis=1)
        self.positions = jnp.maximum(count - 1, 0)
        self._rotations = Rotations(self.positions, [None])

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
        kind = self._layers[layer]
        rotation = self._rotations.of(0, kind.rope)
        (q,), k = rotation.queries(q), rotation.keys(k)
        attention: Callable[..., jax.Array] = functools.partial(
            _attention, scale=q.shape[-1] ** -0.5 if scale is None else scale, soft_cap=soft_cap
        )
        if self._remat:
            attention = jax.checkpoint(attention)
        return attention(q, k, v, self._seen(kind.window), sinks)

    def _seen(self, window: int | None) -> jax.Array:
        """Which keys each query sees, bool ``[B,N,N]``: itself in any case, so that no row is empty."""
        at = jnp.arange(self._real.shape[1])
        seen = (at[None, :] <= at[:, None])[None] & self._real[:, None, :]
        if window is not None:
            distance = self.positions[:, :, None] - self.positions[:, None, :]
            seen &= distance < window
        return seen | (at[None, :] == at[:, None])[None]


def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float,
    soft_cap: float | None,
) -> jax.Array:
    """Softmax attention in float32: ``[B,N,Hq,D]`` in the dtype of ``q``, see ``Attend``."""
    batch, n, heads, dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, n, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("bnhgd,bmhd->bhgnm", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    if sinks is not None:
        extra = sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(extra, (*scores.shape[:4], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :n].astype(v.dtype)
    out = jnp.einsum("bhgnm,bmhd->bnhgd", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


class InOrder:
    """``Attend`` that a user's model calls: passes on what comes once for each layer, in order."""

    def __init__(self, attend: Attend, dtype: DTypeLike | None, positions: jax.Array) -> None:
        """``dtype`` is that of the cache, if known; ``positions`` int32 ``[B,N]`` is what the model sees."""
        self._attend, self._dtype, self._positions = attend, dtype, positions
        self.count = 0
        self.gave_positions = False

    @property
    def positions(self) -> jax.Array:
        """As in ``Attend``. Whether anybody has asked is known from then on."""
        self.gave_positions = True
        return self._positions

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
        if layer != self.count:
            raise UserError(
                f"model calls attend for layer {layer} where layer {self.count} comes next; call it once "
                "for each layer, from 0 on, in order"
            )
        self.count += 1
        given = (each.astype(self._dtype or each.dtype) for each in (q, k, v))
        out = self._attend(layer, *given, scale=scale, soft_cap=soft_cap, sinks=sinks)
        return out.astype(q.dtype)


@dataclasses.dataclass(frozen=True)
class Hooked:
    """How a model has called an ``attention_fn``: its mask, and what it would have called."""

    mask: jax.Array | None
    is_causal: bool
    original: Callable[..., Any]


class AttentionHook:
    """Makes functions that stand in for ``attention_fn`` in the attention layers of Flax."""

    def __init__(self, attend: Attend) -> None:
        """``attend`` is given the layers in the order in which they are called."""
        self._attend = attend
        self.calls: list[Hooked] = []

    def instead_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function to be called in its place; itself where it is one already."""
        if hasattr(original, "gkv_original"):
            return original

        # Linen passes only arguments that the function names.
        def attention(
            query: jax.Array,
            key: jax.Array,
            value: jax.Array,
            bias: jax.Array | None = None,
            mask: jax.Array | None = None,
            broadcast_dropout: bool = True,
            dropout_rng: jax.Array | None = None,
            dropout_rate: float = 0.0,
            deterministic: bool = True,
            dtype: Any = None,
            precision: Any = None,
            module: Any = None,
            is_causal: bool = False,
            force_fp32_for_softmax: bool = False,  # it is always float32 here
            scale: float | None = None,
            implementation: str | None = None,  # of jax.nn.dot_product_attention; ours is another
            qk_attn_weights_einsum: Any = None,
            attn_weights_value_einsum: Any = None,
            **others: Any,
        ) -> jax.Array:
            layer = len(self.calls)
            others |= {
                "qk_attn_weights_einsum": qk_attn_weights_einsum,
                "attn_weights_value_einsum": attn_weights_value_einsum,
            }
            asked = [name for name, value in others.items() if value is not None]
            if asked:
                raise UserError(
                    f"attention layer {layer} is called with {', '.join(asked)}, which cannot be passed on "
                    "to a cache; leave it out, say windows by mask, or take our attend as an argument, see "
                    "docs/flax.md"
                )
            if bias is not None:
                raise UserError(
                    f"attention layer {layer} adds a bias to its scores, which a cache cannot serve; use "
                    "positions in keys and queries (rotations), or none"
                )
            if dropout_rate and not deterministic:
                raise UserError(
                    f"attention layer {layer} has dropout; give options={{'deterministic': True}}, or "
                    "whatever turns it off in your model"
                )
            if query.ndim != 4:
                raise UserError(
                    f"attention layer {layer} gets queries {list(query.shape)}; they must be [B,N,H,D]: "
                    "call the layer with inputs [B,N,features], outside of vmap"
                )
            if key.shape[1] != query.shape[1] or value.shape[1] != query.shape[1]:
                raise UserError(
                    f"attention layer {layer} has {query.shape[1]} queries and {key.shape[1]} keys; only "
                    "self-attention over the tokens is served, no cross-attention"
                )
            self.calls.append(Hooked(mask, is_causal, original))
            return self._attend(layer, query, key, value, scale=scale)

        given = original.keywords if isinstance(original, functools.partial) else {}
        hooked = functools.partial(attention, **given)
        hooked.gkv_original = original  # type: ignore[attr-defined]
        return hooked
