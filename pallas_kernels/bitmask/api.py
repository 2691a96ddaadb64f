"""Checks the operands of `apply_token_bitmask` and picks the implementation that runs it."""

import operator
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.bitmask.packed import BITS_PER_WORD, num_words
from pallas_kernels.bitmask.slices import words_of_drafts, words_of_shard
from pallas_kernels.dispatch import Implementation

_LOGITS_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def apply_token_bitmask(
    logits: jax.Array,
    bitmask: jax.Array,
    enabled: jax.Array,
    *,
    first_token: int | jax.Array = 0,
    vocab_size: int | None = None,
    d2t: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Gives every token that its row's mask does not allow the lowest finite logit.

    Allowed tokens come back unchanged; in rows with `enabled = 0` all are allowed. A row whose mask
    allows nothing becomes a row of equal, finite values; that it is a dead end is for the mask's
    owner to see.
    Where the caller has no further use for the logits (donated, or a temporary of the same jit),
    the kernels write in place. They expand the words in registers: no integer or boolean array of
    the logits' shape exists in device memory.

    The logits may be a part of the vocabulary, as in a program whose LM head is sharded over it:
    every shard passes its own logits, its own `first_token`, and the mask of all tokens, which is
    small enough to be replicated. They may also be over the pruned vocabulary of an EAGLE-3 draft
    model (arXiv:2503.01840), whose checkpoints hold `d2t`; the mask stays that of the target model.
    Both together are possible. The bits of drafts are looked up one by one before the kernel runs,
    in int32 arrays of the logits' shape. In a `jax.shard_map` the kernels need `check_vma=False`.

    Args:
      logits: float32, bfloat16 or float16 `[..., V]`, any number of leading dimensions and any V.
      bitmask: int32 `[..., W]` with `W = ceil(vocab_size / 32)`, in the format of XGrammar and
        LLGuidance: token `t` is bit `t & 31` of word `t >> 5`, 1 is allowed. Bits at and beyond
        `vocab_size` are ignored.
      enabled: int32 `[...]`, 0 where the row has no grammar: every token is allowed.
      first_token: the token of `logits[..., 0]`, an int or an int32 scalar that may be traced: the
        first of the shard. A multiple of 32, unless `d2t` is given; a traced one that is not, or
        that is negative, allows nothing. With `d2t` it is a draft token.
      vocab_size: how many tokens the mask is for. None is V, and is only possible where the logits
        are over all of them. Logits of tokens from here on, which pad the last shard, are not
        allowed in any row.
      d2t: int32 `[V]`. Draft token `g` is the target token `g + d2t[i]`, where `g = first_token + i`
        counts through the whole draft vocabulary, and `i` through this shard. Target tokens outside
        the mask are not allowed.
      implementation: `"xla"` (every platform), `"mosaic_tpu"` (TPU; float32 and bfloat16) or
        `"triton"` (NVIDIA GPU of compute capability 8.0 and up). None picks by `jax.devices()[0]`
        and the dtype, and falls back to `"xla"`; name one to compile for any other device.

    Returns:
      The masked logits, of the shape and dtype of `logits`.

    Raises:
      ValueError: an operand has a wrong dtype, shape or value, `implementation` is no known name,
        or the implementation named does not take this dtype. The message begins with the
        argument's name.
    """
    _check_logits(logits)
    _check_rows("enabled", enabled, logits.shape[:-1])
    _check_d2t(d2t, logits.shape[-1])
    first_token = _checked_first_token(first_token, aligned=d2t is None)
    whole = d2t is None and isinstance(first_token, int) and first_token == 0
    vocab_size = _checked_vocab_size(vocab_size, logits.shape[-1] if whole else None)
    _check_rows("bitmask", bitmask, (*logits.shape[:-1], num_words(vocab_size)))

    def reason_against(module: ModuleType) -> str | None:
        reason: str | None = module.unsupported(logits.dtype)
        return reason

    module = dispatch.choose("bitmask", implementation, reason_against)
    if logits.size == 0:
        return logits
    if d2t is not None or not whole or vocab_size != logits.shape[-1]:
        # In words, so that padding is no token of a row without a grammar either.
        bitmask = jnp.where(enabled[..., None] == 0, -1, bitmask)
        enabled = jnp.ones_like(enabled)
        if d2t is not None:
            bitmask = words_of_drafts(bitmask, d2t, first_token, vocab_size)
        else:
            bitmask = words_of_shard(bitmask, logits.shape[-1], first_token, vocab_size)
    masked: jax.Array = module.apply_token_bitmask(logits, bitmask, enabled)
    return masked


def _check_logits(logits: jax.Array) -> None:
    if logits.dtype not in _LOGITS_DTYPES:
        raise ValueError(f"logits: must be float32, bfloat16 or float16, got {logits.dtype}")
    if logits.ndim == 0:
        raise ValueError("logits: must have a vocabulary dimension [..., V], got a scalar")


def _check_rows(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    if array.dtype != jnp.int32:
        raise ValueError(f"{name}: must be int32, got {array.dtype}")
    if array.shape != shape:
        about = f" ({BITS_PER_WORD} tokens a word)" if name == "bitmask" else ""
        raise ValueError(f"{name}: must be {list(shape)}{about}, got {list(array.shape)}")


def _check_d2t(d2t: jax.Array | None, vocab_size: int) -> None:
    if d2t is None:
        return
    if d2t.dtype != jnp.int32:
        raise ValueError(f"d2t: must be int32, got {d2t.dtype}")
    if d2t.shape != (vocab_size,):
        raise ValueError(f"d2t: must be {[vocab_size]}, one per logit, got {list(d2t.shape)}")


def _checked_first_token(first_token: int | jax.Array, *, aligned: bool) -> int | jax.Array:
    if isinstance(first_token, jax.Array):
        if first_token.dtype != jnp.int32 or first_token.ndim != 0:
            raise ValueError(
                f"first_token: must be an int or an int32 scalar, got {first_token.dtype} "
                f"{list(first_token.shape)}"
            )
        return first_token
    try:
        first_token = operator.index(first_token)
    except TypeError:
        raise ValueError(
            f"first_token: must be an int or an int32 scalar, got {first_token!r}"
        ) from None
    if not 0 <= first_token < 2**31:
        raise ValueError(f"first_token: must be in [0, 2**31), got {first_token}")
    if aligned and first_token % BITS_PER_WORD:
        raise ValueError(
            f"first_token: must be a multiple of {BITS_PER_WORD}, as shards do not share a word "
            f"of the mask, got {first_token}"
        )
    return first_token


def _checked_vocab_size(vocab_size: int | None, default: int | None) -> int:
    if vocab_size is None:
        if default is None:
            raise ValueError("vocab_size: must be given with first_token or d2t")
        return default
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ValueError(f"vocab_size: must be a positive int, got {vocab_size!r}")
    return vocab_size
