"""The TPU kernel: words expand to bits in vector registers while the logits stream through VMEM.

A vector register holds 128 lanes. One register of mask words therefore covers 32 registers of
logits, 4096 tokens: for register k, lane l needs bit `l % 32` of word `4 k + l // 32`, which is a
gather of lanes within one register, a shift and a select. Only the packed words travel from HBM
beside the logits, 1/32 of the bytes of float32 logits.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.bitmask.packed import BITS_PER_WORD, masked_logit

SUBLANES, LANES = 8, 128  # the shape of a 32-bit vector register
GROUP = LANES * BITS_PER_WORD  # tokens that one register of words covers
# Four groups make a block of 512 KiB of float32 logits: long enough for full HBM bandwidth, and
# with double buffering in and out still only 2 MiB of VMEM.
MAX_GROUPS_PER_BLOCK = 4


def supports_device(device: jax.Device) -> bool:
    """Whether `device` has the lane gather: TPU v4 and later."""
    return device.platform == "tpu" and not device.device_kind.startswith(("TPU v2", "TPU v3"))


def supports_dtype(dtype: DTypeLike) -> bool:
    """Whether Mosaic loads vectors of `dtype`; it has no float16."""
    return dtype in (jnp.float32, jnp.bfloat16)


def apply_token_bitmask(
    logits: jax.Array,
    bitmask: jax.Array,
    enabled: jax.Array,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """See `pallas_kernels.bitmask.apply_token_bitmask`, which has checked the operands.

    `interpret` runs the kernel without a TPU: True through XLA, `InterpretParams` with TPU memory
    semantics (there, rows and V must fill whole blocks).
    """
    *rows, vocab_size = logits.shape
    # XLA lays out [B, N, V] in tiles of 8 N × 128 V, or 8 B × 128 V where N is 1. Merging B and N
    # would move every logit to another tile, except in that second case.
    num_queries = rows[-1] if rows else 1
    batch_and_queries = (1, -1) if len(rows) == 1 or num_queries == 1 else (-1, num_queries)
    masked = _masked(
        logits.reshape(*batch_and_queries, vocab_size),
        bitmask.reshape(*batch_and_queries, bitmask.shape[-1]),
        enabled.reshape(*batch_and_queries, 1),
        interpret,
    )
    return masked.reshape(logits.shape)


def _masked(
    logits: jax.Array,
    bitmask: jax.Array,
    enabled: jax.Array,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """logits [B, N, V], bitmask [B, N, W], enabled [B, N, 1]."""
    batch, num_queries, vocab_size = logits.shape
    block_v = GROUP * min(MAX_GROUPS_PER_BLOCK, pl.cdiv(vocab_size, GROUP))
    block_w = block_v // BITS_PER_WORD
    # Blocks that stick out over N, V or W read garbage there, and their writes there are dropped.
    logits_spec = pl.BlockSpec((None, SUBLANES, block_v), lambda b, n, v: (b, n, v))
    return pl.pallas_call(
        _kernel,
        grid=(batch, pl.cdiv(num_queries, SUBLANES), pl.cdiv(vocab_size, block_v)),
        in_specs=[
            pl.BlockSpec((None, SUBLANES, 1), lambda b, n, v: (b, n, jnp.int32(0))),
            pl.BlockSpec((None, SUBLANES, block_w), lambda b, n, v: (b, n, v)),
            logits_spec,
        ],
        out_specs=logits_spec,
        out_shape=jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=interpret,
        name="apply_token_bitmask",
    )(enabled, bitmask, logits)


def _kernel(
    enabled_ref: jax.Ref, words_ref: jax.Ref, logits_ref: jax.Ref, masked_ref: jax.Ref
) -> None:
    """One block: enabled [8, 1], words [8, block_w], logits and masked [8, block_v]."""
    lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
    # Shifts, as `//` and `%` of signed integers lower to a dozen operations and ask for a live TPU.
    word_in_register, bit = lane >> 5, lane & 31
    allow_all = -(enabled_ref[...] == 0).astype(jnp.int32)  # −1 has every bit set
    lowest = jnp.float32(masked_logit(logits_ref.dtype))

    def mask_group(group: jax.Array, carry: None) -> None:
        start = pl.multiple_of(group * LANES, LANES)
        words = words_ref[:, pl.ds(start, LANES)] | allow_all
        for k in range(BITS_PER_WORD):
            index = word_in_register + k * (LANES // BITS_PER_WORD)
            word = jnp.take_along_axis(words, index, axis=1, mode="promise_in_bounds")
            allowed = lax.shift_right_logical(word, bit) & 1
            start = pl.multiple_of(group * GROUP + k * LANES, LANES)
            tokens = pl.ds(start, LANES)
            # Selected as float32, which holds every bfloat16: not every TPU selects 16-bit lanes.
            logits = logits_ref[:, tokens].astype(jnp.float32)
            masked_ref[:, tokens] = jnp.where(allowed != 0, logits, lowest).astype(masked_ref.dtype)
        return carry

    # Typed bounds, as the typed 0 above: Python's are 64 bits wide where `jax_enable_x64` is set.
    num_groups = words_ref.shape[-1] // LANES
    lax.fori_loop(jnp.int32(0), jnp.int32(num_groups), mask_group, None)
