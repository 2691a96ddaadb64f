"""The TPU kernel: tiles of the head stream through VMEM and are sampled where they are multiplied.

A list says which tiles hold a token that some row may sample; the grid is as long as the list. A
step multiplies its tile of the head with all rows, and the logits go from the matrix unit into VMEM
and from there, expanded mask words beside them, into the best score and token of each place of a
register, as in `pallas_kernels.masked_sample.mosaic_tpu`. The last step reduces these. A group of 8
rows computes noise only if one of its rows draws.

The kernel takes the head with its features along lanes, as an embedding is looked up. XLA prefers
tokens along lanes where that pads less, as for the 576 features of SmolLM2-135M, and then copies the
head once before a decode loop begins. A head whose features are a multiple of 128, or which is given
the layout when it is put on the device, is taken as it lies.

One block of rows is meant to hold the whole batch. Batches that are too large for that (see
`MAX_HIDDEN_BYTES`) read the listed tiles once for each block of rows.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.bitmask.packed import BITS_PER_WORD
from pallas_kernels.masked_head.tiles import active_tiles
from pallas_kernels.masked_sample import arithmetic
from pallas_kernels.masked_sample import mosaic_tpu as sampler
from pallas_kernels.masked_sample import xla as definition
from pallas_kernels.masked_sample.rows import Rows

SUBLANES, LANES = 8, 128  # the shape of a 32-bit vector register
GROUP = LANES * BITS_PER_WORD  # tokens that one register of words covers
# A step costs a third of a microsecond beside its DMA, and 1 MiB takes v6e twice as long; smaller
# tiles follow the masks more closely.
MAX_TILE = 512
TILE_BYTES = 1 << 20
MAX_FEATURES = 8192  # of which the smallest tile, of float32, fills 4 MiB; v4 has 16, all in all
FEATURES = 1024  # multiplied at once: float32 is split into three bfloat16, which take space, too
MAX_ROWS = 256
MAX_HIDDEN_BYTES = 2 << 20

# The columns of the rows' parameters, all int32 or the bits of float32.
_ENABLED, _INVERSE, _IS_RANDOM, _HASH = range(4)


def unsupported(dtype: DTypeLike, hidden_shape: tuple[int, ...], vocab_size: int) -> str | None:
    """Why such a head is not taken, or None: Mosaic loads no vectors of float16."""
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"a head of {dtype}"
    if hidden_shape[-1] > MAX_FEATURES:
        return f"more than {MAX_FEATURES} features"
    return None


def sample_active(
    hidden: jax.Array,
    head: jax.Array,
    bitmask: jax.Array,
    enabled: jax.Array,
    positions: jax.Array,
    rows: Rows,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.masked_head.sample_active`, which has checked the operands.

    `interpret` runs the kernels without a TPU: True through XLA, `InterpretParams` with TPU memory
    semantics (there, rows and V must fill whole blocks).
    """
    blocks = Blocks.of(hidden, head)
    words = definition.effective_words(bitmask, enabled, blocks.vocab_size)
    indices, count = active_tiles(words, blocks.tile)  # all that these words are needed for

    def by_row(x: jax.Array) -> jax.Array:
        """`[B]` or `[B,N]` as `[B × N]`."""
        x = x[:, None] if x.ndim == 1 else x
        return jnp.broadcast_to(x, positions.shape).reshape(-1)

    parameters = jnp.stack(
        [
            by_row(enabled),
            by_row(arithmetic.bits_of(rows.inverse_temperature)),
            by_row(rows.is_random).astype(jnp.int32),
            by_row(arithmetic.hash_row(rows.seed[:, None], positions)),
        ],
        axis=-1,
    )
    bitmask = bitmask.reshape(positions.size, bitmask.shape[-1])
    hidden = hidden.reshape(positions.size, hidden.shape[-1])
    if not interpret:
        # Or XLA moves all of the head to VMEM before the kernel runs, where it has the room.
        head = pltpu.with_memory_space_constraint(head, pltpu.HBM)
    features = hidden.shape[-1]
    block = blocks.rows_of_block

    def rows_of(r: jax.Array, *_: Any) -> Any:
        return r, jnp.int32(0)

    sampled = pl.pallas_call(
        functools.partial(_kernel, blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            # One step at least, which writes the answer. Where no tile is active, it is all zeros.
            grid=(blocks.num_blocks, jnp.maximum(count, 1)),
            in_specs=[
                pl.BlockSpec((block, parameters.shape[-1]), rows_of),
                pl.BlockSpec((block, LANES), blocks.words_of_step),
                pl.BlockSpec((block, features), rows_of),
                pl.BlockSpec((blocks.tile, features), blocks.tile_of_step),
            ],
            out_specs=pl.BlockSpec((block, 1), rows_of),
            scratch_shapes=[
                pltpu.VMEM((block, blocks.tile), jnp.float32),
                pltpu.VMEM((block, LANES), jnp.float32),
                pltpu.VMEM((block, LANES), jnp.int32),
                pltpu.SMEM((block // SUBLANES,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((positions.size, 1), jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        # The whole head, as rows without a grammar need it: what a step really reads is known only
        # when it runs, and may be a hundredth of this.
        cost_estimate=pl.CostEstimate(
            flops=blocks.num_blocks * (2 * block * head.size + 10 * block * blocks.vocab_size),
            transcendentals=0,
            bytes_accessed=blocks.num_blocks * head.size * head.dtype.itemsize
            + hidden.size * hidden.dtype.itemsize
            + 4 * (bitmask.size + parameters.size),
        ),
        interpret=interpret,
        name="masked_head",
    )(indices, parameters, bitmask, hidden, head)
    tokens = sampled.reshape(positions.shape)
    return tokens, jnp.minimum(count * blocks.tile, jnp.int32(blocks.vocab_size))


@dataclass(frozen=True)
class Blocks:
    """How the rows `[B × N]` fall into blocks, and the head `[V,Dm]` into tiles.

    The last ones may stick out. What lies there is garbage: tokens that are not legal, and rows whose
    tokens are dropped.
    """

    num_rows: int
    rows_of_block: int
    vocab_size: int
    tile: int

    @classmethod
    def of(cls, hidden: jax.Array, head: jax.Array) -> "Blocks":
        batch, num_queries, features = hidden.shape
        row_bytes = features * head.dtype.itemsize
        sublanes = SUBLANES * 4 // head.dtype.itemsize  # rows of a register of this dtype
        most_rows = min(MAX_ROWS, MAX_HIDDEN_BYTES // row_bytes // sublanes * sublanes)
        rows = pl.cdiv(max(batch * num_queries, 1), sublanes) * sublanes
        tile = MAX_TILE
        while tile > LANES and tile * row_bytes > TILE_BYTES:
            tile //= 2
        return cls(batch * num_queries, min(rows, most_rows), head.shape[0], tile)

    @property
    def num_blocks(self) -> int:
        return pl.cdiv(max(self.num_rows, 1), self.rows_of_block)

    def tile_of_step(self, r: jax.Array, i: jax.Array, tiles: jax.Ref, *_: Any) -> Any:
        """The place of a step's block of the head. Pallas fetches what was not there before."""
        return tiles[i], jnp.int32(0)

    def words_of_step(self, r: jax.Array, i: jax.Array, tiles: jax.Ref) -> Any:
        """The place of the register of words that covers the tile and its neighbours."""
        return r, self.register(tiles[i])

    def register(self, tile: jax.Array) -> jax.Array:
        tiles_of_register = GROUP // self.tile
        return tile >> (tiles_of_register.bit_length() - 1)  # as it is a power of two


def _kernel(
    blocks: Blocks,
    tiles_ref: jax.Ref,
    parameters_ref: jax.Ref,
    words_ref: jax.Ref,
    hidden_ref: jax.Ref,
    head_ref: jax.Ref,
    token_ref: jax.Ref,
    logits_ref: jax.Ref,
    best_ref: jax.Ref,
    best_token_ref: jax.Ref,
    draws_ref: jax.Ref,
) -> None:
    """One tile of the head for one block of R rows.

    Refs: the list of tiles `[tiles]`, in scalar memory; parameters `[R,4]`, words `[R,128]`, hidden
    states `[R,Dm]`, head `[tile,Dm]`; tokens `[R,1]`; logits `[R,tile]`, the best score and token of
    each place, `[R,128]`, and whether any of 8 rows draws, `[R / 8]` in scalar memory.
    """
    i = pl.program_id(1)
    num_groups = blocks.rows_of_block // SUBLANES
    tile = tiles_ref[i]
    register = blocks.register(tile)
    lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
    in_vocabulary = sampler.real_bits(register * LANES + lane, blocks.vocab_size)

    def column(group: jax.Array, column: int) -> jax.Array:
        """One parameter of eight rows in every lane, int32 `[8,128]`."""
        values = parameters_ref[_rows(group), column : column + 1]
        return jnp.broadcast_to(values, (SUBLANES, LANES))

    def for_groups(visit: Callable[[jax.Array], None]) -> None:
        def one(group: jax.Array, carry: None) -> None:
            visit(group)
            return carry

        # Typed bounds: Python's are 64 bits wide where `jax_enable_x64` is set.
        lax.fori_loop(jnp.int32(0), jnp.int32(num_groups), one, None)

    @pl.when(i == 0)
    def _() -> None:
        best_ref[...] = jnp.full_like(best_ref, -jnp.inf)
        best_token_ref[...] = jnp.zeros_like(best_token_ref)

        def look(group: jax.Array) -> None:
            draws_ref[group] = jnp.max(column(group, _IS_RANDOM))

        for_groups(look)

    for start in range(0, hidden_ref.shape[1], FEATURES):
        features = slice(start, start + FEATURES)
        part = lax.dot_general(
            hidden_ref[:, features],
            head_ref[:, features],
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if head_ref.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        logits_ref[...] = part if start == 0 else logits_ref[...] + part

    def visit(group: jax.Array, score: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
        """Eight rows, whose score is `score(logits, tokens)`, all `[8,128]`."""
        rows = _rows(group)
        words = jnp.where(column(group, _ENABLED) == 0, jnp.int32(-1), words_ref[rows, :])
        words = words & in_vocabulary
        first_word = tile * (blocks.tile // BITS_PER_WORD) - register * LANES
        highest, token = best_ref[rows, :], best_token_ref[rows, :]
        for k in range(blocks.tile // LANES):
            index = (lane >> 5) + (first_word + k * (LANES // BITS_PER_WORD))
            word = jnp.take_along_axis(words, index, axis=1, mode="promise_in_bounds")
            legal = lax.shift_right_logical(word, lane & 31) & 1
            candidate = lane + (tile * blocks.tile + k * LANES)
            scores = score(logits_ref[rows, k * LANES : (k + 1) * LANES], candidate)
            scores = jnp.where(legal != 0, scores, -jnp.inf)
            improves = scores > highest
            highest = jnp.where(improves, scores, highest)
            token = jnp.where(improves, candidate, token)
        best_ref[rows, :], best_token_ref[rows, :] = highest, token

    def visit_group(group: jax.Array) -> None:
        is_random = draws_ref[group] != 0

        @pl.when(~is_random)
        def _() -> None:
            visit(group, lambda logits, token: arithmetic.finite(logits))

        @pl.when(is_random)
        def _() -> None:
            inverse, row_hash = column(group, _INVERSE), column(group, _HASH)
            random_rows = column(group, _IS_RANDOM)

            def score(logits: jax.Array, token: jax.Array) -> jax.Array:
                scaled = arithmetic.scaled(logits, arithmetic.float_of(inverse))
                noisy = arithmetic.noisy(scaled, row_hash, token)
                return jnp.where(random_rows != 0, noisy, arithmetic.finite(logits))

            visit(group, score)

    for_groups(visit_group)

    @pl.when(i == pl.num_programs(1) - 1)
    def _() -> None:
        highest = jnp.max(best_ref[...], axis=1, keepdims=True)
        holders = jnp.where(best_ref[...] == highest, best_token_ref[...], jnp.int32(2**31 - 1))
        token_ref[...] = jnp.min(holders, axis=1, keepdims=True)


def _rows(group: jax.Array) -> Any:
    return pl.ds(pl.multiple_of(group * SUBLANES, SUBLANES), SUBLANES)
