"""How keys and values lie in the cache: in a float dtype, or as int8 with a factor for each token.

A token of a KV head is one vector. In bfloat16 and float8_e4m3fn it is rounded element by element. In
int8 it is ``data * scale`` with ``scale = max|x| / 127`` of its own: nothing is ever clipped, whatever
comes later, and the error of an element is at most half a step, ``scale / 2``. Attention folds the
factor of a key into its score and that of a value into its weight, so that no dequantised copy of the
cache is needed.

Some channels of keys are far larger than the others, in all tokens alike, and would leave the others
few steps; values have none of these (KIVI, arXiv 2402.02750; KVQuant, arXiv 2401.18079). So int8 keys
are divided by a scale for each channel before they are written, and queries multiplied by it. Both
papers want that before the rotation, which mixes a channel with its partner; a scale that the two
have in common passes through the rotation, and rotated keys can be stored. It never changes within a
text, and is not part of `Stored`: what is written and read here are keys that the caller has divided
already, see `channel_scale`.

Not every compiler scatters into every buffer as it lies; others it converts there and back with each
write. XLA:CPU does so with bfloat16 and float8, so that there int8 is the one to save memory with. XLA:TPU
does so with float8 and int8 unless D = 128, or D = 64 and the buffer has less than 128 MiB.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from gkv_jax.cache.spec import Storage
from gkv_jax.errors import UserError

_LEVELS = 127  # int8 is used symmetrically: -128 is not
_TINY = 1e-30  # stands for a largest element of 0; divided by 127, it is still a normal float32
_FEWEST_TOKENS = 4  # that a channel scale is made from
_FLOAT8_PLATFORMS = ("cpu", "gpu", "tpu")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data", "scale"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Stored:
    """Keys, or values, of one layer: ``data * scale`` where there is a scale, else ``data``.

    Attributes:
      data: ``[B,Hk,C,D]`` in a float dtype or int8.
      scale: float32 ``[B,Hk,C]``, positive and finite in every slot; None unless ``data`` is int8.
    """

    data: jax.Array
    scale: jax.Array | None

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


def storage_dtype(name: Storage | None, weights: DTypeLike) -> jnp.dtype:
    """The dtype of the buffers for ``CacheSpec.dtype``: None stands for that of the weights."""
    return jnp.dtype(weights if name is None else name)


def check_dtype(name: Storage | None, platform: str) -> None:
    """Refuse a ``CacheSpec.dtype`` that is not served on ``jax.Device.platform``.

    Raises:
      UserError: naming the field and a dtype that works.
    """
    if name == "float8_e4m3fn" and platform not in _FLOAT8_PLATFORMS:
        raise UserError(
            f"cache.dtype is {name!r}, which is served on {', '.join(_FLOAT8_PLATFORMS)} and not on "
            f"{platform}; choose 'int8' or 'bfloat16'"
        )


def _has_scale(dtype: DTypeLike) -> bool:
    return jnp.dtype(dtype) == jnp.int8


def empty(shape: tuple[int, int, int, int], dtype: DTypeLike) -> Stored:
    """Buffers ``[B,Hk,C,D]`` of zeros. Not garbage: 0 · NaN is NaN even where masked."""
    scale = jnp.ones(shape[:3], jnp.float32) if _has_scale(dtype) else None
    return Stored(jnp.zeros(shape, dtype), scale)


def encode(values: jax.Array, dtype: DTypeLike) -> Stored:
    """Vectors ``[...,D]`` as they will be stored: data ``[...,D]``, for int8 with a scale ``[...]``.

    float8_e4m3fn has no infinity: what is beyond its largest number, 448, becomes that number.
    """
    if _has_scale(dtype):
        exact = values.astype(jnp.float32)
        scale = jnp.maximum(jnp.abs(exact).max(axis=-1), _TINY) / _LEVELS
        return Stored(jnp.round(exact / scale[..., None]).astype(jnp.int8), scale)
    if jnp.dtype(dtype) == jnp.float8_e4m3fn:
        largest = float(jnp.finfo(jnp.float8_e4m3fn).max)
        values = jnp.clip(values.astype(jnp.float32), -largest, largest)
    return Stored(values.astype(dtype), None)


def write(stored: Stored, rows: jax.Array, slots: jax.Array, values: jax.Array) -> Stored:
    """Write tokens to their slots, in place where ``stored`` is donated.

    Slots of C and beyond are dropped; ``dynamic_update_slice`` would clamp them to the edge and
    overwrite another token. Two tokens of a call must not have the same slot.

    Args:
      rows: batch rows, int32 ``[b,N]`` or ``[b,1]``.
      slots: int32 ``[b,N]``, or ``[b,N,Hk]`` where KV heads write to slots of their own.
      values: ``[b,N,Hk,D]`` in any float dtype; keys under int8 are divided by their channel scale.
    """
    # One index for every head. With a slice over the heads XLA:TPU prefers another layout for the
    # buffer and converts it (seen in the compiled program of a batch of one).
    heads = jnp.arange(stored.data.shape[1])[None, None, :]
    slots = slots if slots.ndim == 3 else slots[:, :, None]
    return _scatter(stored, rows[:, :, None], heads, slots, encode(values, stored.data.dtype))


def move(stored: Stored, rows: jax.Array, source: jax.Array, target: jax.Array) -> Stored:
    """Copy tokens to other slots of their row and head, bit by bit, in place where donated.

    All are read before any is written, so that sources and targets may overlap.

    Args:
      rows: batch rows, int32 ``[b]``.
      source: slots to read, int32 ``[b,Hk,M]``.
      target: slots to write, int32 ``[b,Hk,M]``; those of C and beyond are dropped, whatever their
        source. Two tokens must not have the same target.
    """
    rows, heads = rows[:, None, None], jnp.arange(stored.data.shape[1])[None, :, None]
    tokens = jax.tree.map(lambda buffer: buffer.at[rows, heads, source].get(mode="clip"), stored)
    # Fused with the scatter, the gather would read what is being written: XLA:CPU copies the buffer then.
    tokens = jax.lax.optimization_barrier(tokens)
    return _scatter(stored, rows, heads, target, tokens)


def load(stored: Stored, rows: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """The vectors ``[b,Hk,C,D]`` of some rows (int32 ``[b]``; None for all), rounded to ``dtype``.

    Keys under int8 come back as they were written: still divided by their channel scale.
    """
    if rows is not None:
        stored = jax.tree.map(lambda buffer: buffer[rows], stored)
    if stored.scale is None:
        return stored.data.astype(dtype)
    return (stored.data.astype(jnp.float32) * stored.scale[..., None]).astype(dtype)


def fill_row(stored: Stored, row: jax.Array, values: jax.Array) -> Stored:
    """Replace all tokens of one row (an int32 scalar) by ``values [Hk,C,D]``."""
    encoded = encode(values, stored.data.dtype)
    return jax.tree.map(lambda buffer, new: buffer.at[row].set(new), stored, encoded)


def channel_scale(k: jax.Array, real: jax.Array, rotary_dim: int | None = None) -> jax.Array:
    """The scale of each channel of a text's keys, from its first tokens: float32 ``[Hk,D]``, positive.

    It is the root of the channels' largest size, as in SmoothQuant (arXiv 2211.10438): with the size
    itself, channels in which these tokens were small by chance would take the steps of all the others
    once they are large. The size of a pair of channels is ``sqrt(k[i]**2 + k[i + d/2]**2)``, which a
    rotation preserves, so that keys have the same scale before it and after; that of a channel which is
    not rotated is its absolute value. None counts for less than half the head's median. Fewer than four
    tokens say too little: the first of a text has keys of its own kind. Their scale is 1.

    Args:
      k: keys ``[N,Hk,D]``, in the half-split layout of `gkv_jax.rope`.
      real: which of the tokens exist, bool ``[N]``.
      rotary_dim: channels d that are rotated, the head's first; None for all.
    """
    half = (k.shape[-1] if rotary_dim is None else rotary_dim) // 2
    k = jnp.where(real[:, None, None], k.astype(jnp.float32), 0.0)
    paired = jnp.hypot(k[..., :half], k[..., half : 2 * half])
    magnitude = jnp.concatenate([paired, jnp.abs(k[..., 2 * half :])], axis=-1).max(axis=0)
    largest = magnitude.max(axis=-1, keepdims=True)
    # The second floor is for heads most of whose channels are 0.
    floor = jnp.maximum(jnp.median(magnitude, axis=-1, keepdims=True) / 2, largest / 1024)
    is_known = (largest > _TINY) & (real.sum() >= _FEWEST_TOKENS)
    scale = jnp.where(is_known, jnp.sqrt(jnp.maximum(magnitude, floor)), 1.0)
    return jnp.concatenate([scale[:, :half], scale], axis=-1)


def scale_queries(q: jax.Array, channels: jax.Array) -> jax.Array:
    """Queries ``[B,N,Hq,D]`` times the channel scale ``[B,Hk,D]`` of their KV heads, in float32.

    Channels that are rotated together share their scale, so that it makes no difference whether the
    queries are rotated before or after.
    """
    batch, n, heads, dim = q.shape
    grouped = q.astype(jnp.float32).reshape(batch, n, channels.shape[1], -1, dim)
    return (grouped * channels[:, None, :, None, :]).reshape(batch, n, heads, dim)


def _scatter(
    stored: Stored, rows: jax.Array, heads: jax.Array, slots: jax.Array, tokens: Stored
) -> Stored:
    """Write encoded tokens at ``[rows, heads, slots]``, three index arrays of three dimensions."""
    if tokens.data.size == stored.data.shape[3]:
        # A scatter of a single index becomes a dynamic-update-slice that reads what it replaces,
        # and XLA:CPU copies the whole buffer for it. A second, dropped index keeps it a scatter.
        slots = jnp.concatenate([slots, jnp.full_like(slots, stored.data.shape[2])], axis=1)
        tokens = jax.tree.map(lambda new: jnp.concatenate([new, new], axis=1), tokens)
    return jax.tree.map(
        lambda buffer, new: buffer.at[rows, heads, slots].set(new, mode="drop"), stored, tokens
    )
