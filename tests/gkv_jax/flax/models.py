"""Small decoders as users of Flax write them, none of which knows of this library."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

List = getattr(nnx, "List", list)
"""Since Flax 0.12 a module's list of modules; before it, any list is one."""

VOCAB, WIDTH, HEADS, LONGEST = 290, 32, 4, 96


def made(model: type[nnx.Module], seed: int = 0, **options: Any) -> Any:
    """A module with random weights. Flax's own initialisers compile a program for each shape."""
    structure = nnx.eval_shape(lambda: model(nnx.Rngs(0), **options))
    graphdef, state = nnx.split(structure)
    return nnx.merge(graphdef, jax.tree.map(_weight(seed), state))


def made_linen(module: linen.Module, seed: int = 0, **options: Any) -> Any:
    """Random variables of a module."""
    init = functools.partial(module.init, jax.random.key(0), **options)
    shapes = jax.eval_shape(init, jax.ShapeDtypeStruct((1, 8), jnp.int32))
    return jax.tree.map(_weight(seed), shapes)


def _weight(seed: int) -> Any:
    random = np.random.default_rng(seed)

    def weight(leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(seed)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        # Tables of unit variance, projections that keep it, scales and biases away from 1 and 0.
        is_table = leaf.ndim < 2 or leaf.shape[0] > 2 * WIDTH
        size = 1.0 if is_table else (leaf.shape[0] if leaf.ndim == 2 else WIDTH) ** -0.5
        mean = 0.3 if leaf.ndim < 2 else 0.0
        return jnp.asarray(random.normal(mean, size, leaf.shape), leaf.dtype)

    return weight


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.0, **attention: Any) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, dropout_rate=dropout, rngs=rngs, **attention
        )
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Learned(nnx.Module):
    """GPT-2's way: a table of positions, tied head."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 1, **options: Any) -> None:
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LONGEST, WIDTH, rngs=rngs)
        self.blocks = List([Block(rngs, **options) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def mask(self, tokens: jax.Array) -> jax.Array | None:
        return nnx.make_causal_mask(tokens)

    def trunk(self, tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, self.mask(tokens))
        return self.norm(x)

    def states(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        return self.trunk(tokens, positions)

    def __call__(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        return self.out(self.trunk(tokens, positions))


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """A user's own rotation, of neighbouring channels."""
    half = x.shape[-1] // 2
    frequencies = 100.0 ** -(np.arange(half) / half)
    angle = positions[:, :, None, None].astype(jnp.float32) * jnp.asarray(
        frequencies[None, None, None, :], jnp.float32
    )
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x.shape)


def grouped(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Older versions of Flax's function want as many KV heads as query heads."""
    k, v = (jnp.repeat(each, q.shape[2] // each.shape[2], axis=2) for each in (k, v))
    return nnx.dot_product_attention(q, k, v, mask=mask)


class RotatedAttention(nnx.Module):
    """Attention of a user's own with the standard hook, two query heads to a KV head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q = nnx.LinearGeneral(WIDTH, (HEADS, 8), rngs=rngs)
        self.k = nnx.LinearGeneral(WIDTH, (HEADS // 2, 8), rngs=rngs)
        self.v = nnx.LinearGeneral(WIDTH, (HEADS // 2, 8), rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, 8), WIDTH, axis=(-2, -1), rngs=rngs)
        self.attention_fn = grouped

    def __call__(self, x: jax.Array, mask: jax.Array, positions: jax.Array) -> jax.Array:
        q, k = (rotated(each(x), positions) for each in (self.q, self.k))
        return self.out(self.attention_fn(q, k, self.v(x), mask=mask))


class Rotated(nnx.Module):
    """Rotations in the user's code, windows in its masks."""

    def __init__(self, rngs: nnx.Rngs, window: int | None = None) -> None:
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.attention = List([RotatedAttention(rngs) for _ in range(2)])
        self.out = nnx.Linear(WIDTH, VOCAB, rngs=rngs)
        self.window = window

    def __call__(self, ids: jax.Array, *, where: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(ids)
        if self.window is not None:
            at = jnp.arange(ids.shape[1])
            near = (at[None, :] > at[:, None] - self.window).astype(mask.dtype)
            mask = nnx.combine_masks(mask, near[None, None])
        x = self.tokens(ids)
        for index, layer in enumerate(self.attention):
            x = x + layer(x, mask if index == 0 else nnx.make_causal_mask(ids), where)
        return self.out(x)


class Grouped(nnx.Module):
    """Takes ``attend``: two query heads to a KV head, learned sinks, a soft cap, a scale."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.q = List([nnx.LinearGeneral(WIDTH, (HEADS, 8), rngs=rngs) for _ in range(2)])
        self.kv = List([nnx.LinearGeneral(WIDTH, (2, 2, 8), rngs=rngs) for _ in range(2)])
        self.o = List(
            [nnx.LinearGeneral((HEADS, 8), WIDTH, axis=(-2, -1), rngs=rngs) for _ in range(2)]
        )
        self.sinks = nnx.Param(jnp.linspace(-1.0, 1.0, HEADS))
        self.out = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array, attend: Any) -> jax.Array:
        x = self.tokens(tokens)
        for layer, (q, kv, o) in enumerate(zip(self.q, self.kv, self.o, strict=True)):
            k, v = jnp.split(kv(x), 2, axis=2)
            k, v = k[:, :, 0], v[:, :, 0]
            seen = attend(layer, q(x), k, v, scale=0.5, soft_cap=4.0, sinks=self.sinks[...])
            x = x + o(seen)
        return self.out(x)


@dataclasses.dataclass(frozen=True)
class Shape:
    width: int = WIDTH


class Mixed(nnx.Module):
    """bfloat16 arithmetic of float32 weights, arrays that are no Variables, a mesh, keys unrotated.

    With ``learned`` a table of positions besides.
    """

    def __init__(self, rngs: nnx.Rngs, learned: bool = False) -> None:
        self.shape = Shape()
        self.tokens = nnx.Embed(VOCAB, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.places = nnx.Embed(LONGEST, WIDTH, dtype=jnp.bfloat16, rngs=rngs) if learned else None
        self.qkv = nnx.LinearGeneral(WIDTH, (3, HEADS, 8), dtype=jnp.bfloat16, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def states(self, tokens: jax.Array, attend: Any) -> jax.Array:
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places(attend.positions)
        x = jax.lax.with_sharding_constraint(x, jax.P(None, "all"))
        q, k, v = (self.qkv(x)[:, :, i] for i in range(3))
        x = x + self.out(attend(0, q, k, v).reshape(x.shape))
        gain, shift = (jnp.asarray(each, x.dtype)[None, None] for each in (self.gain, self.shift))
        return x * gain + shift

    def __call__(self, tokens: jax.Array, attend: Any) -> jax.Array:
        states = self.states(tokens, attend)
        logits = self.head(states).astype(jnp.float32)
        return 3.0 * jnp.tanh(logits / 3.0)


def made_mixed(**options: Any) -> Mixed:
    model: Mixed = made(Mixed, **options)
    model.gain = jnp.linspace(0.5, 1.5, WIDTH)
    model.shift = np.linspace(-0.5, 0.5, WIDTH)  # float64
    return model


class Linen(linen.Module):
    """As ``Learned``, in linen, with dropout."""

    layers: int = 1
    dropout: float = 0.1
    decode: bool = False
    remat: bool = False

    @linen.compact
    def __call__(
        self, tokens: jax.Array, positions: jax.Array | None = None, *, train: bool
    ) -> jax.Array:
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        # As Flax's examples do: no token sees padding.
        mask = linen.combine_masks(
            linen.make_causal_mask(tokens), linen.make_attention_mask(tokens > 0, tokens > 0)
        )
        x = linen.Embed(VOCAB, WIDTH)(tokens) + linen.Embed(LONGEST, WIDTH)(positions)
        block = linen.remat(LinenBlock, static_argnums=(3,)) if self.remat else LinenBlock
        for _ in range(self.layers):
            x = block(self.dropout, self.decode)(x, mask, train)
        return linen.Dense(VOCAB)(linen.LayerNorm()(x))


class LinenBlock(linen.Module):
    dropout: float
    decode: bool

    @linen.compact
    def __call__(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        attention = linen.MultiHeadDotProductAttention(
            HEADS, dropout_rate=self.dropout, deterministic=not train, decode=self.decode
        )
        x = x + attention(linen.LayerNorm()(x), mask=mask)
        h = linen.gelu(linen.Dense(2 * WIDTH)(linen.LayerNorm()(x)))
        return x + linen.Dropout(self.dropout, deterministic=not train)(linen.Dense(WIDTH)(h))
