"""The TPU kernel: words expand to bits in vector registers while the logits stream through VMEM.

A vector register holds 128 lanes. One register of mask words therefore covers 32 registers of
logits, 4096 tokens: for register k, lane l needs bit `l % 32` of word `4 k + l // 32`, which is a
gather of lanes within one register, a shift and a select. Only the packed words travel from HBM
beside the logits, 1/32 of the bytes of float32 logits.

A block is 8 rows × 16384 tokens, and its words say which way it goes:

- every row allows every token: it is neither read nor written. The output is the input's buffer.
- no row allows any token: it is written and not read.
- else it is read, masked and written.

A first, small kernel looks through the words and lists for every step of the second one which block
to read and which to write. Pallas moves a block when the step's block is not that of the step
before; a step with nothing to move is therefore given the next block that moves, or the last one.
The words are read twice for this, once more than before, which is 1/64 of the traffic of float32
logits. A list has to name some block: where a half of the grid has none, its first is rewritten as is.

The lists are made by a kernel because XLA schedules a chain of small operations for them, and by the
compiler's account each has a price however few integers it is for: together more than the masking
that they save. One kernel still has a price, so logits of less than `MIN_BYTES_TO_SKIP` are masked
without lists, every block read and written.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

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
# Where lists begin to pay: moving this in and out takes 10 µs on v5e and 5 µs on v6e.
MIN_BYTES_TO_SKIP = 4_000_000
MAX_LISTED_BLOCKS = 1 << 15  # two lists of this length take a quarter of the scalar memory
# v4 and v5p split a parallel grid dimension over two cores. Each half of the blocks has lists of
# its own, so that the cores never touch the same one.
HALVES = 2
# The kernel that makes the lists reads this many blocks' words at a time, 512 KiB.
MAX_BLOCKS_PER_LOOK = 32

_ILLEGAL, _LEGAL = 1, 2  # what a block's words contain; both bits where they are mixed


def unsupported(dtype: DTypeLike) -> str | None:
    """Why logits of `dtype` are not taken, or None: Mosaic loads no vectors of float16."""
    dtype = jnp.dtype(dtype)
    return None if dtype in (jnp.float32, jnp.bfloat16) else f"{dtype} logits"


def apply_token_bitmask(
    logits: jax.Array,
    bitmask: jax.Array,
    enabled: jax.Array,
    *,
    skip_blocks: bool | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """See `pallas_kernels.bitmask.apply_token_bitmask`, which has checked the operands.

    `skip_blocks` says whether to make lists of the blocks to touch; None decides by the size of the
    logits. `interpret` runs the kernels without a TPU: True through XLA, `InterpretParams` with TPU
    memory semantics (there, rows and V must fill whole blocks).
    """
    *rows, vocab_size = logits.shape
    # XLA lays out [B, N, V] in tiles of 8 N × 128 V, or 8 B × 128 V where N is 1. Merging B and N
    # would move every logit to another tile, except in that second case.
    num_queries = rows[-1] if rows else 1
    batch_and_queries = (1, -1) if len(rows) == 1 or num_queries == 1 else (-1, num_queries)
    logits_3d = logits.reshape(*batch_and_queries, vocab_size)
    bitmask_3d = bitmask.reshape(*batch_and_queries, bitmask.shape[-1])
    enabled_3d = enabled.reshape(*batch_and_queries, 1)
    blocks = _Blocks.of(logits_3d.shape)
    if skip_blocks is None:
        skip_blocks = (
            logits.size * logits.dtype.itemsize >= MIN_BYTES_TO_SKIP
            and HALVES < blocks.count <= MAX_LISTED_BLOCKS
        )
    mask = _mask_some if skip_blocks else _mask_all
    return mask(blocks, logits_3d, bitmask_3d, enabled_3d, interpret).reshape(logits.shape)


@dataclass(frozen=True)
class _Blocks:
    """How logits [B, N, V] fall into blocks of 8 N × `block_v` V.

    Blocks that stick out over N or V read garbage there, and their writes there are dropped.
    """

    num_queries: int
    vocab_size: int
    block_v: int
    grid: tuple[int, int, int]

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> "_Blocks":
        batch, num_queries, vocab_size = shape
        block_v = GROUP * min(MAX_GROUPS_PER_BLOCK, pl.cdiv(vocab_size, GROUP))
        grid = (batch, pl.cdiv(num_queries, SUBLANES), pl.cdiv(vocab_size, block_v))
        return cls(num_queries, vocab_size, block_v, grid)

    @property
    def block_w(self) -> int:
        return self.block_v // BITS_PER_WORD

    @property
    def count(self) -> int:
        return math.prod(self.grid)

    # In lists a block is one integer of three bit fields, as a division would be dozens of scalar
    # operations for each step and operand.
    @property
    def _bits(self) -> tuple[int, int]:
        return (self.grid[1] - 1).bit_length(), (self.grid[2] - 1).bit_length()

    def pack(self, b: jax.Array, n: jax.Array, v: jax.Array) -> jax.Array:
        n_bits, v_bits = self._bits
        return (((b << n_bits) | n) << v_bits) | v

    def unpack(self, block: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        n_bits, v_bits = self._bits
        v = block & ((1 << v_bits) - 1)
        n = (block >> v_bits) & ((1 << n_bits) - 1)
        return block >> (n_bits + v_bits), n, v


def _first_column(b: jax.Array, n: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    del v
    return b, n, jnp.int32(0)


def _logits_out(logits: jax.Array) -> Any:
    return jax.ShapeDtypeStruct(logits.shape, logits.dtype)


def _cost(logits: jax.Array, bitmask: jax.Array, enabled: jax.Array) -> pl.CostEstimate:
    """The most that masking moves and does."""
    return pl.CostEstimate(
        flops=4 * logits.size,
        transcendentals=0,
        bytes_accessed=2 * logits.size * logits.dtype.itemsize + 4 * (bitmask.size + enabled.size),
    )


def _mask_all(
    blocks: _Blocks,
    logits: jax.Array,
    bitmask: jax.Array,
    enabled: jax.Array,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """Reads and writes every block. logits [B, N, V], bitmask [B, N, W], enabled [B, N, 1]."""
    logits_spec = pl.BlockSpec((None, SUBLANES, blocks.block_v), lambda b, n, v: (b, n, v))
    return pl.pallas_call(
        _mask_block,
        grid=blocks.grid,
        in_specs=[
            pl.BlockSpec((None, SUBLANES, 1), _first_column),
            pl.BlockSpec((None, SUBLANES, blocks.block_w), lambda b, n, v: (b, n, v)),
            logits_spec,
        ],
        out_specs=logits_spec,
        out_shape=_logits_out(logits),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        cost_estimate=_cost(logits, bitmask, enabled),
        interpret=interpret,
        name="apply_token_bitmask",
    )(enabled, bitmask, logits)


def _mask_some(
    blocks: _Blocks,
    logits: jax.Array,
    bitmask: jax.Array,
    enabled: jax.Array,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """The same, but moves only the blocks that it has to."""
    reads, writes = _list_blocks(blocks, bitmask, enabled, interpret)
    steps = pl.cdiv(blocks.count, HALVES)

    def block_to_read(half: jax.Array, step: jax.Array, reads: jax.Ref, _: jax.Ref) -> Any:
        return blocks.unpack(reads[half * steps + step] >> 1)

    def rows_to_read(*args: Any) -> Any:
        return _first_column(*block_to_read(*args))

    def block_to_write(half: jax.Array, step: jax.Array, _: jax.Ref, writes: jax.Ref) -> Any:
        return blocks.unpack(writes[half * steps + step] >> 1)

    return pl.pallas_call(
        _visit_block,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(HALVES, steps),
            in_specs=[
                pl.BlockSpec((None, SUBLANES, 1), rows_to_read),
                pl.BlockSpec((None, SUBLANES, blocks.block_w), block_to_read),
                pl.BlockSpec((None, SUBLANES, blocks.block_v), block_to_read),
            ],
            out_specs=pl.BlockSpec((None, SUBLANES, blocks.block_v), block_to_write),
        ),
        out_shape=_logits_out(logits),
        input_output_aliases={4: 0},  # counted with the lists
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(logits, bitmask, enabled),
        interpret=interpret,
        name="apply_token_bitmask",
    )(reads, writes, enabled, bitmask, logits)


def _visit_block(
    reads_ref: jax.Ref,
    writes_ref: jax.Ref,
    enabled_ref: jax.Ref,
    words_ref: jax.Ref,
    logits_ref: jax.Ref,
    masked_ref: jax.Ref,
) -> None:
    """One step. An odd entry of a list names the step's own block, an even one some other."""
    step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
    read, write = (reads_ref[step] & 1) != 0, (writes_ref[step] & 1) != 0

    @pl.when(read & write)
    def mask() -> None:
        _mask_block(enabled_ref, words_ref, logits_ref, masked_ref)

    @pl.when(~read & write)
    def fill() -> None:
        masked_ref[...] = jnp.full_like(masked_ref, masked_logit(masked_ref.dtype))


def _list_blocks(
    blocks: _Blocks,
    bitmask: jax.Array,
    enabled: jax.Array,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array]:
    """The block to read and the block to write in each step, int32 [2 × steps a half]."""
    batch, along_n, along_v = blocks.grid
    per_look = min(MAX_BLOCKS_PER_LOOK, along_v)
    entries = HALVES * pl.cdiv(blocks.count, HALVES)
    whole_list = pl.BlockSpec((entries,), lambda *_: (jnp.int32(0),), memory_space=pltpu.SMEM)
    reads, writes = pl.pallas_call(
        functools.partial(_list_kernel, blocks),
        grid=(batch, along_n, pl.cdiv(along_v, per_look)),
        in_specs=[
            pl.BlockSpec((None, SUBLANES, 1), _first_column),
            pl.BlockSpec((None, SUBLANES, per_look * blocks.block_w), lambda b, n, v: (b, n, v)),
        ],
        out_specs=[whole_list] * 2,
        out_shape=[jax.ShapeDtypeStruct((entries,), jnp.int32)] * 2,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
        cost_estimate=pl.CostEstimate(
            flops=8 * bitmask.size,
            transcendentals=0,
            bytes_accessed=4 * (bitmask.size + enabled.size + 2 * entries),
        ),
        interpret=interpret,
        name="list_blocks_of_bitmask",
    )(enabled, bitmask)
    return reads, writes


def _list_kernel(
    blocks: _Blocks,
    enabled_ref: jax.Ref,
    words_ref: jax.Ref,
    reads_ref: jax.Ref,
    writes_ref: jax.Ref,
) -> None:
    """enabled [8, 1], words [8, blocks a look × block_w], both lists in scalar memory.

    While it looks through the words, `writes_ref` holds each block and what its words contain.
    """
    b, n, look = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _, along_n, along_v = blocks.grid
    per_look = words_ref.shape[-1] // blocks.block_w
    shape = (SUBLANES, blocks.block_w)
    row = n * SUBLANES + lax.broadcasted_iota(jnp.int32, shape, 0)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    allow_all = -(enabled_ref[...] == 0).astype(jnp.int32)
    whole_words, more_bits = divmod(blocks.vocab_size, BITS_PER_WORD)
    none = jnp.int32(0)
    for i in range(per_look):
        v = look * per_look + i
        word = v * blocks.block_w + lane
        # Garbage beyond the last row and the last word, and bits beyond V, must not count.
        real = jnp.where(word == whole_words, jnp.int32((1 << more_bits) - 1), none)
        real = jnp.where(word < whole_words, jnp.int32(-1), real)
        real = jnp.where(row < blocks.num_queries, real, none)
        words = words_ref[:, i * blocks.block_w : (i + 1) * blocks.block_w] | allow_all
        # Maxima, as integer sums widen where `jax_enable_x64` is set, and nothing else is reduced.
        illegal = jnp.max(jnp.where((~words & real) != 0, jnp.int32(_ILLEGAL), none))
        legal = jnp.max(jnp.where((words & real) != 0, jnp.int32(_LEGAL), none))
        contents = illegal | legal

        @pl.when(v < along_v)
        def note(v: jax.Array = v, contents: jax.Array = contents) -> None:
            place = (b * along_n + n) * along_v + v
            writes_ref[place] = (blocks.pack(b, n, v) << 2) | contents

    last_step = [pl.program_id(i) == pl.num_programs(i) - 1 for i in range(3)]

    @pl.when(last_step[0] & last_step[1] & last_step[2])
    def finish() -> None:
        steps = writes_ref.shape[0] // HALVES
        for half in range(HALVES):
            start, stop = half * steps, min((half + 1) * steps, blocks.count)
            _finish_lists(reads_ref, writes_ref, start, stop)
            for unused in range(stop, (half + 1) * steps):
                reads_ref[unused] = reads_ref[stop - 1] & ~1
                writes_ref[unused] = writes_ref[stop - 1] & ~1


def _finish_lists(reads_ref: jax.Ref, writes_ref: jax.Ref, start: int, stop: int) -> None:
    """Turns the blocks and contents of one half into the entries of both lists.

    An entry is twice the block, plus 1 in that block's own step. In a half without any block to
    read or write, the first block is it: the kernel then masks it, which is right for every block.
    """

    def block_and_contents(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        return writes_ref[step] >> 2, writes_ref[step] & 3

    def find_last(step: jax.Array, last: tuple[jax.Array, jax.Array]) -> Any:
        return take_block(*block_and_contents(step), *last)

    def take_block(block: Any, contents: Any, read: Any, write: Any) -> Any:
        return (
            jnp.where(contents == _ILLEGAL | _LEGAL, block, read),
            jnp.where((contents & _ILLEGAL) != 0, block, write),
        )

    def fill_backwards(i: jax.Array, following: tuple[jax.Array, jax.Array]) -> Any:
        step = stop - 1 - i
        block, contents = block_and_contents(step)
        read, write = take_block(block, contents, *following)
        reads_ref[step] = (read << 1) | (read == block).astype(jnp.int32)
        writes_ref[step] = (write << 1) | (write == block).astype(jnp.int32)
        return read, write

    first = writes_ref[start] >> 2
    last = lax.fori_loop(jnp.int32(start), jnp.int32(stop), find_last, (first, first))
    lax.fori_loop(jnp.int32(0), jnp.int32(stop - start), fill_backwards, last)


def _mask_block(
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

    # Typed bounds, as all constants here: Python's are 64 bits wide where `jax_enable_x64` is set.
    num_groups = words_ref.shape[-1] // LANES
    lax.fori_loop(jnp.int32(0), jnp.int32(num_groups), mask_group, None)
