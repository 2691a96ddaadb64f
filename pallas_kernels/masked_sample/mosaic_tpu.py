"""The TPU kernels: one reads the logits once and keeps the best token of every lane, the other filters.

Mask words expand in vector registers as in `pallas_kernels.bitmask.mosaic_tpu`: a register of words
covers 32 registers of logits. Each of the 8 × 128 places of a register has a best score and token of
its own, which the last tile of the vocabulary reduces to one per row: no reduction along the way.

A group of 8 rows computes noise only if one of its rows draws at all, and a tile in which no row of
the group has a legal token is passed over. With large logits it is not even moved: a list says for
every step which tile to have in VMEM, and Pallas moves a tile when it is not the step's before. The
list is made by a small kernel that reads the words; small logits are read without.

Top-k, top-p and min-p are the bisection of `pallas_kernels.masked_sample.xla.least_kept`. Its kernel
holds keys and weights of 8 rows' whole vocabulary in VMEM, so it reads the logits once, not once a step.
It runs only where a row filters.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from pallas_kernels.bitmask.packed import BITS_PER_WORD
from pallas_kernels.masked_sample import arithmetic, xla
from pallas_kernels.masked_sample.rows import Rows

SUBLANES, LANES = 8, 128  # the shape of a 32-bit vector register
GROUP = LANES * BITS_PER_WORD  # tokens that one register of words covers
UNROLLED = 8  # registers in flight: enough to fill the vector units, and they fit the register file
MAX_GROUPS_PER_BLOCK = 4  # 512 KiB of float32 logits: long enough for full HBM bandwidth
# Of logits, which take 5 µs to read on v5e and 2.5 µs on v6e. A list costs one more kernel, about 2 µs.
MIN_BYTES_TO_SKIP = 4_000_000
MAX_LISTED_BLOCKS = 1 << 15  # an eighth of the scalar memory
# VMEM for the keys and weights of a group: v4 has 16 MiB in all, later ones 64 and more.
MIN_FILTER_BYTES, MAX_FILTER_BYTES = 13 << 20, 40 << 20
_STREAM_BYTES = 2 << 20  # for what streams through, and registers spilled

# The columns of the rows' parameters, all int32 or the bits of float32.
_ENABLED, _INVERSE, _IS_RANDOM, _HASH, _LEAST = range(5)
_TOP_K, _TOP_P, _MIN_P = range(2, 5)
# What the rows of a group ask for.
_FILTERS, _BY_COUNT, _BY_MASS = 1, 2, 4

T = TypeVar("T")


def unsupported(dtype: DTypeLike, vocab_size: int) -> str | None:
    """Why such logits are not taken, or None: Mosaic loads no vectors of float16."""
    dtype = jnp.dtype(dtype)
    return None if dtype in (jnp.float32, jnp.bfloat16) else f"{dtype} logits"


def masked_sample(
    logits: jax.Array,
    bitmask: jax.Array,
    enabled: jax.Array,
    positions: jax.Array,
    rows: Rows,
    *,
    skip_tiles: bool | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """See `pallas_kernels.masked_sample.masked_sample`, which has checked the operands.

    `skip_tiles` says whether to make a list of the tiles to read; None decides by the size of the
    logits. `interpret` runs the kernels without a TPU: True through XLA, `InterpretParams` with TPU
    memory semantics (there, rows and V must fill whole blocks).
    """
    # XLA does not look into the branch below for the layout that its kernel wants: without this it
    # chooses another one for [B,N,V] and copies the logits before either kernel.
    order = (1, 0, 2) if logits.shape[1] == 1 else (0, 1, 2)  # see `_Tiles.of`
    logits = with_layout_constraint(logits, Layout(order))
    everything = jnp.full(positions.shape, arithmetic.LEAST_KEY, jnp.int32)

    def thresholds() -> jax.Array:
        return least_kept(logits, bitmask, enabled, rows, interpret=interpret)

    least = lax.cond(jnp.any(rows.is_filtered), thresholds, lambda: everything)
    return sample(
        logits,
        bitmask,
        enabled,
        positions,
        rows,
        least,
        skip_tiles=skip_tiles,
        interpret=interpret,
    )


def sample(
    logits: jax.Array,
    bitmask: jax.Array,
    enabled: jax.Array,
    positions: jax.Array,
    rows: Rows,
    least: jax.Array,
    *,
    skip_tiles: bool | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Samples int32 `[B,N]` from the tokens whose key is at least `least`, int32 `[B,N]`."""
    tiles = _Tiles.of(logits)
    is_random = _per_query(rows.is_random, positions.shape).astype(jnp.int32)
    parameters = jnp.stack(
        [
            enabled,
            arithmetic.bits_of(_per_query(rows.inverse_temperature, positions.shape)),
            is_random,
            arithmetic.hash_row(rows.seed[:, None], positions),
            least,
        ],
        axis=-1,
    )
    logits, bitmask, parameters, is_random = map(
        tiles.arrange, (logits, bitmask, parameters, is_random[..., None])
    )
    if skip_tiles is None:
        skip_tiles = (
            logits.size * logits.dtype.itemsize >= MIN_BYTES_TO_SKIP
            and tiles.num_blocks <= MAX_LISTED_BLOCKS
        )
    prefetched = [tiles.any_of_group(is_random[..., 0])]
    if skip_tiles:
        prefetched.append(_list_tiles(tiles, parameters, bitmask, interpret))

    def tile(b: jax.Array, n: jax.Array, v: jax.Array, _: jax.Ref, *lists: jax.Ref) -> Any:
        for list_ref in lists:
            v = list_ref[tiles.index(b, n, v)]
        return b, n, v

    def group(b: jax.Array, n: jax.Array, *_: Any) -> Any:
        return b, n, jnp.int32(0)

    sampled = pl.pallas_call(
        functools.partial(_sample_kernel, tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=tiles.grid,
            in_specs=[
                pl.BlockSpec((None, SUBLANES, parameters.shape[-1]), group),
                pl.BlockSpec((None, SUBLANES, tiles.block_w), tile),
                pl.BlockSpec((None, SUBLANES, tiles.block_v), tile),
            ],
            out_specs=pl.BlockSpec((None, SUBLANES, 1), group),
            scratch_shapes=[
                pltpu.VMEM((SUBLANES, LANES), jnp.float32),
                pltpu.VMEM((SUBLANES, LANES), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((*logits.shape[:-1], 1), jnp.int32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=tiles.cost(logits, bitmask, parameters, flops_per_logit=10),
        interpret=interpret,
        name="masked_sample",
    )(*prefetched, parameters, bitmask, logits)
    return sampled.reshape(positions.shape)


def least_kept(
    logits: jax.Array,
    bitmask: jax.Array,
    enabled: jax.Array,
    rows: Rows,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """What `pallas_kernels.masked_sample.xla.least_kept` gives for rows that filter, int32 `[B,N]`.

    Of other rows it is anything: where the whole group does not filter, LEAST_KEY.
    """
    tiles = _Tiles.of(logits)
    shape = enabled.shape
    whole_bytes = 4 * tiles.whole[0] * tiles.whole[1]
    scratch_arrays = min(2, _filter_bytes() // whole_bytes)
    if scratch_arrays == 0:
        words = xla.effective_words(bitmask, enabled, tiles.vocab_size)
        is_legal = xla.legal(words, 0, words.shape[-1] * BITS_PER_WORD)[..., : tiles.vocab_size]
        return xla.least_kept(logits, is_legal, rows)[..., 0]
    asked = (jnp.ones_like(rows.is_filtered), rows.top_k > 0, rows.top_p < 1)
    wants = jnp.zeros_like(rows.top_k)
    for want, flag in zip((_FILTERS, _BY_COUNT, _BY_MASS), asked, strict=True):
        wants |= (flag & rows.is_filtered).astype(jnp.int32) * want
    columns = [
        arithmetic.bits_of(rows.inverse_temperature),
        rows.top_k,
        arithmetic.bits_of(rows.top_p),
        arithmetic.bits_of(rows.min_p),
    ]
    parameters = jnp.stack([enabled, *(_per_query(c, shape) for c in columns)], axis=-1)
    logits, bitmask, parameters = map(tiles.arrange, (logits, bitmask, parameters))
    wants = tiles.any_of_group(tiles.arrange(_per_query(wants, shape)[..., None])[..., 0])

    def tile(b: jax.Array, n: jax.Array, v: jax.Array, wants: jax.Ref) -> Any:
        # A group that does not filter has one tile moved, for nothing.
        return b, n, jnp.where(wants[tiles.index(b, n)] != 0, v, jnp.int32(0))

    def group(b: jax.Array, n: jax.Array, *_: Any) -> Any:
        return b, n, jnp.int32(0)

    kept = pl.pallas_call(
        functools.partial(_filter_kernel, tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=tiles.grid,
            in_specs=[
                pl.BlockSpec((None, SUBLANES, parameters.shape[-1]), group),
                pl.BlockSpec((None, SUBLANES, tiles.block_w), tile),
                pl.BlockSpec((None, SUBLANES, tiles.block_v), tile),
            ],
            out_specs=pl.BlockSpec((None, SUBLANES, 1), group),
            scratch_shapes=[pltpu.VMEM(tiles.whole, jnp.int32)] * scratch_arrays,
        ),
        out_shape=jax.ShapeDtypeStruct((*logits.shape[:-1], 1), jnp.int32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=scratch_arrays * whole_bytes + _STREAM_BYTES,
        ),
        cost_estimate=tiles.cost(logits, bitmask, parameters, flops_per_logit=300),
        interpret=interpret,
        name="masked_sample_least_kept",
    )(wants, parameters, bitmask, logits)
    return kept.reshape(shape)


def _filter_bytes() -> int:
    """How much VMEM the filters may fill; as little as on v4 where the TPU is not this process's."""
    device = jax.devices()[0]
    is_small = device.platform != "tpu" or device.device_kind.startswith("TPU v4")
    return MIN_FILTER_BYTES if is_small else MAX_FILTER_BYTES


def _per_query(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`[B]` as `[B,N]`."""
    return jnp.broadcast_to(row[:, None], shape)


@dataclass(frozen=True)
class _Tiles:
    """How logits `[B,N,V]` fall into tiles of 8 N × `block_v` V.

    Tiles that stick out over N or V read garbage there, which counts as illegal.
    """

    batch: int
    num_queries: int
    vocab_size: int

    @classmethod
    def of(cls, logits: jax.Array) -> "_Tiles":
        # XLA lays out [B, N, V] in tiles of 8 N × 128 V, or 8 B × 128 V where N is 1. Merging B and
        # N would move every logit to another tile, except in that second case.
        batch, num_queries, vocab_size = logits.shape
        if num_queries == 1:
            return cls(1, batch, vocab_size)
        return cls(batch, num_queries, vocab_size)

    def arrange(self, x: jax.Array) -> jax.Array:
        """`[B,N,...]` as the kernels have it."""
        return x.reshape(self.batch, self.num_queries, x.shape[-1])

    @property
    def block_v(self) -> int:
        return GROUP * min(MAX_GROUPS_PER_BLOCK, pl.cdiv(self.vocab_size, GROUP))

    @property
    def block_w(self) -> int:
        return self.block_v // BITS_PER_WORD

    @property
    def grid(self) -> tuple[int, int, int]:
        groups = pl.cdiv(self.num_queries, SUBLANES)
        return self.batch, groups, pl.cdiv(self.vocab_size, self.block_v)

    @property
    def num_blocks(self) -> int:
        batch, groups, along_v = self.grid
        return batch * groups * along_v

    @property
    def whole(self) -> tuple[int, int]:
        """The shape of an array of a group's whole vocabulary."""
        return SUBLANES, self.grid[2] * self.block_v

    def index(self, b: jax.Array, n: jax.Array, v: jax.Array | None = None) -> jax.Array:
        """The place of a group, or of a tile, in what is prefetched."""
        group = b * self.grid[1] + n
        return group if v is None else group * self.grid[2] + v

    def any_of_group(self, flags: jax.Array) -> jax.Array:
        """The flags int32 `[B,N]` of each group's rows, joined: int32 `[groups]`."""
        missing = -self.num_queries % SUBLANES
        flags = jnp.pad(flags, ((0, 0), (0, missing)))
        return lax.reduce_or(flags.reshape(-1, SUBLANES), (1,))

    def cost(self, logits: jax.Array, *others: jax.Array, flops_per_logit: int) -> pl.CostEstimate:
        """One read of everything."""
        return pl.CostEstimate(
            flops=flops_per_logit * logits.size,
            transcendentals=0,
            bytes_accessed=logits.size * logits.dtype.itemsize + 4 * sum(x.size for x in others),
        )


def _list_tiles(
    tiles: _Tiles,
    parameters: jax.Array,
    bitmask: jax.Array,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """Which tile each step has in VMEM, int32 `[groups × tiles]`.

    Its own if that has a legal token, otherwise the next one that has, or the last.
    """
    batch, groups, along_v = tiles.grid

    def group(b: jax.Array, n: jax.Array) -> Any:
        return b, n, jnp.int32(0)

    listed: jax.Array = pl.pallas_call(
        functools.partial(_list_kernel, tiles),
        grid=(batch, groups),
        in_specs=[
            pl.BlockSpec((None, SUBLANES, parameters.shape[-1]), group),
            pl.BlockSpec((None, SUBLANES, along_v * tiles.block_w), group),
        ],
        # With an index map, as the one by default has 64 bits where `jax_enable_x64` is set.
        out_specs=pl.BlockSpec(
            (tiles.num_blocks,), lambda b, n: (jnp.int32(0),), memory_space=pltpu.SMEM
        ),
        out_shape=jax.ShapeDtypeStruct((tiles.num_blocks,), jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        cost_estimate=tiles.cost(bitmask, parameters, flops_per_logit=4),
        interpret=interpret,
        name="masked_sample_tiles",
    )(parameters, bitmask)
    return listed


def _list_kernel(
    tiles: _Tiles, parameters_ref: jax.Ref, words_ref: jax.Ref, list_ref: jax.Ref
) -> None:
    """Parameters `[8,5]` and all words `[8,tiles × block_w]` of a group; the list `[groups × tiles]`."""
    b, n = pl.program_id(0), pl.program_id(1)
    along_v, num_groups = tiles.grid[2], tiles.block_w // LANES

    def look(v: jax.Array, last: jax.Array) -> jax.Array:
        words = jnp.zeros((SUBLANES, LANES), jnp.int32)
        for group in range(num_groups):
            place = v * num_groups + group
            words |= _legal_words(tiles, parameters_ref, words_ref, n, place)
        is_live = jnp.max((words != 0).astype(jnp.int32))
        list_ref[tiles.index(b, n, v)] = is_live
        return jnp.where(is_live != 0, v, last)

    def fill(step: jax.Array, following: jax.Array) -> jax.Array:
        v = along_v - 1 - step
        place = tiles.index(b, n, v)
        following = jnp.where(list_ref[place] != 0, v, following)
        list_ref[place] = following
        return following

    _loop(along_v, fill, _loop(along_v, look, jnp.int32(0)))


def real_bits(word: jax.Array, vocab_size: int) -> jax.Array:
    """The bits of the words with these indices that stand for tokens of the vocabulary."""
    whole_words, more_bits = divmod(vocab_size, BITS_PER_WORD)
    some = jnp.where(word == whole_words, jnp.int32((1 << more_bits) - 1), jnp.int32(0))
    return jnp.where(word < whole_words, jnp.int32(-1), some)


def _legal_words(
    tiles: _Tiles,
    parameters_ref: jax.Ref,
    words_ref: jax.Ref,
    n: jax.Array,
    group: jax.Array,
    first_group: jax.Array | int = 0,
) -> jax.Array:
    """The words `[8,128]` of a group of tokens for the n-th 8 rows: 0 for what sticks out.

    `group` counts from the first of `words_ref`, which is the vocabulary's `first_group`.
    """
    words = words_ref[:, pl.ds(pl.multiple_of(group * LANES, LANES), LANES)]
    row = lax.broadcasted_iota(jnp.int32, words.shape, 0) + n * SUBLANES
    word = lax.broadcasted_iota(jnp.int32, words.shape, 1) + (first_group + group) * LANES
    words = jnp.where(parameters_ref[:, _ENABLED : _ENABLED + 1] == 0, jnp.int32(-1), words)
    return jnp.where(row < tiles.num_queries, words & real_bits(word, tiles.vocab_size), 0)


def _fold_registers(
    words: jax.Array,
    logits_ref: jax.Ref,
    group: jax.Array,
    visit: Callable[[jax.Array, jax.Array, jax.Array, T], T],
    carry: T,
) -> T:
    """Calls `visit(first, logits, legal, carry)` for the 32 registers `[8,128]` of a group of tokens.

    first is the token of lane 0, counted from the start of the tile, logits are float32, legal is
    int32 0 or 1. In the order of the tokens.
    """
    lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
    # Shifts, as `//` and `%` of signed integers lower to a dozen operations.
    word_in_register, bit = lane >> 5, lane & 31

    def some(step: jax.Array, carry: T) -> T:
        for i in range(UNROLLED):
            k = step * UNROLLED + i
            index = word_in_register + k * (LANES // BITS_PER_WORD)
            word = jnp.take_along_axis(words, index, axis=1, mode="promise_in_bounds")
            legal = lax.shift_right_logical(word, bit) & 1
            first = pl.multiple_of(group * GROUP + k * LANES, LANES)
            carry = visit(
                first, logits_ref[:, pl.ds(first, LANES)].astype(jnp.float32), legal, carry
            )
        return carry

    return _loop(BITS_PER_WORD // UNROLLED, some, carry)


def _loop(steps: int, body: Callable[[jax.Array, T], T], carry: T) -> T:
    # Typed bounds: Python's are 64 bits wide where `jax_enable_x64` is set.
    result: T = lax.fori_loop(jnp.int32(0), jnp.int32(steps), body, carry)
    return result


def _column(parameters_ref: jax.Ref, column: int) -> jax.Array:
    """One parameter of the rows in every lane, int32 `[8,128]`."""
    return jnp.broadcast_to(parameters_ref[:, column : column + 1], (SUBLANES, LANES))


def _sample_kernel(tiles: _Tiles, is_random_ref: jax.Ref, *refs: jax.Ref) -> None:
    """One tile of one group of rows.

    Refs: whether the group draws `[groups]` and, if there is one, the list of tiles, both in scalar
    memory; parameters `[8,5]`, words `[8,block_w]`, logits `[8,block_v]`; tokens `[8,1]`; the best
    score and token of each place of a register, `[8,128]`.
    """
    *lists, parameters_ref, words_ref, logits_ref, token_ref, best_ref, best_token_ref = refs
    b, n, v = (pl.program_id(axis) for axis in range(3))
    num_groups = words_ref.shape[-1] // LANES

    def legal_words(group: jax.Array) -> jax.Array:
        first_group = v * num_groups
        return _legal_words(tiles, parameters_ref, words_ref, n, group, first_group)

    @pl.when(v == 0)
    def _() -> None:
        best_ref[...] = jnp.full_like(best_ref, -jnp.inf)
        best_token_ref[...] = jnp.zeros_like(best_token_ref)

    def visit_tile(score: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
        lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)

        def visit_group(group: jax.Array, best: tuple[jax.Array, jax.Array]) -> Any:
            def visit(first: jax.Array, logits: jax.Array, legal: jax.Array, best: Any) -> Any:
                highest, token = best
                candidate = lane + (v * tiles.block_v + first)
                scores = jnp.where(legal != 0, score(logits, candidate), -jnp.inf)
                improves = scores > highest
                return (
                    jnp.where(improves, scores, highest),
                    jnp.where(improves, candidate, token),
                )

            return _fold_registers(legal_words(group), logits_ref, group, visit, best)

        best = _loop(num_groups, visit_group, (best_ref[...], best_token_ref[...]))
        best_ref[...], best_token_ref[...] = best

    def random_score(logits: jax.Array, token: jax.Array) -> jax.Array:
        inverse = arithmetic.float_of(_column(parameters_ref, _INVERSE))
        scaled = arithmetic.scaled(logits, inverse)
        noisy = arithmetic.noisy(scaled, _column(parameters_ref, _HASH), token)
        kept = arithmetic.key(scaled) >= _column(parameters_ref, _LEAST)
        noisy = jnp.where(kept, noisy, -jnp.inf)
        is_random = _column(parameters_ref, _IS_RANDOM) != 0
        return jnp.where(is_random, noisy, arithmetic.finite(logits))

    def live_words(group: jax.Array, live: jax.Array) -> jax.Array:
        return live | legal_words(group)

    words = _loop(num_groups, live_words, jnp.zeros((SUBLANES, LANES), jnp.int32))
    is_live = jnp.max((words != 0).astype(jnp.int32)) != 0
    for list_ref in lists:
        is_live &= list_ref[tiles.index(b, n, v)] == v
    is_random = is_random_ref[tiles.index(b, n)] != 0

    @pl.when(is_live & ~is_random)
    def _() -> None:
        visit_tile(lambda logits, token: arithmetic.finite(logits))

    @pl.when(is_live & is_random)
    def _() -> None:
        visit_tile(random_score)

    @pl.when(v == pl.num_programs(2) - 1)
    def _() -> None:
        highest = jnp.max(best_ref[...], axis=1, keepdims=True)
        holders = jnp.where(best_ref[...] == highest, best_token_ref[...], jnp.int32(2**31 - 1))
        token_ref[...] = jnp.min(holders, axis=1, keepdims=True)


def _filter_kernel(
    tiles: _Tiles,
    wants_ref: jax.Ref,
    parameters_ref: jax.Ref,
    words_ref: jax.Ref,
    logits_ref: jax.Ref,
    least_ref: jax.Ref,
    keys_ref: jax.Ref,
    *weights_refs: jax.Ref,
) -> None:
    """One tile of one group of rows; the last one bisects.

    What each group wants `[groups]`, in scalar memory; parameters `[8,5]`, words `[8,block_w]`,
    logits `[8,block_v]`; the least keys `[8,1]`; keys and, if they find room, weights of the whole
    vocabulary.
    """
    b, n, v = (pl.program_id(axis) for axis in range(3))
    wants = wants_ref[tiles.index(b, n)]
    is_last = v == pl.num_programs(2) - 1
    least_key = jnp.full((SUBLANES, LANES), arithmetic.LEAST_KEY, jnp.int32)

    @pl.when(wants != 0)
    def _() -> None:
        inverse = arithmetic.float_of(_column(parameters_ref, _INVERSE))
        num_groups = words_ref.shape[-1] // LANES

        def visit_group(group: jax.Array, carry: None) -> None:
            def visit(first: jax.Array, logits: jax.Array, legal: jax.Array, carry: None) -> None:
                scaled = arithmetic.scaled(logits, inverse)
                start = pl.multiple_of(v * tiles.block_v + first, LANES)
                keys_ref[:, pl.ds(start, LANES)] = jnp.where(
                    legal != 0, arithmetic.key(scaled), least_key
                )

            words = _legal_words(tiles, parameters_ref, words_ref, n, group, v * num_groups)
            _fold_registers(words, logits_ref, group, visit, None)
            return carry

        _loop(num_groups, visit_group, None)

    @pl.when(is_last & (wants == 0))
    def _() -> None:
        least_ref[...] = least_key[:, :1]

    @pl.when(is_last & (wants != 0))
    def _() -> None:
        least_ref[...] = _bisect(wants, parameters_ref, keys_ref, *weights_refs)[:, :1]


def _bisect(
    wants: jax.Array, parameters_ref: jax.Ref, keys_ref: jax.Ref, *weights_refs: jax.Ref
) -> jax.Array:
    """`xla.least_kept` of the keys in VMEM, int32 `[8,128]`, the same in all lanes."""
    shape = (SUBLANES, LANES)
    least_key = jnp.full(shape, arithmetic.LEAST_KEY, jnp.int32)
    zero = jnp.zeros(shape, jnp.int32)
    top_k = _column(parameters_ref, _TOP_K)
    top_p = arithmetic.float_of(_column(parameters_ref, _TOP_P))
    min_p = arithmetic.float_of(_column(parameters_ref, _MIN_P))

    def fold(visit: Callable[[Any, T], T], carry: T) -> T:
        """`visit(place, carry)` for every register `[8,128]` of the vocabulary."""

        def some(step: jax.Array, carry: T) -> T:
            for i in range(UNROLLED):
                start = pl.multiple_of((step * UNROLLED + i) * LANES, LANES)
                carry = visit(pl.ds(start, LANES), carry)
            return carry

        return _loop(keys_ref.shape[-1] // (UNROLLED * LANES), some, carry)

    def over_lanes(reduce: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(reduce(x, axis=1, keepdims=True), shape)

    # Typed, as NumPy's rules make sums 64 bits wide where `jax_enable_x64` is set.
    total = functools.partial(jnp.sum, dtype=jnp.int32)

    highest = fold(lambda at, highest: jnp.maximum(highest, keys_ref[:, at]), least_key)
    highest = over_lanes(jnp.max, highest)

    def most_likely_k() -> jax.Array:
        def is_enough(least: jax.Array) -> jax.Array:
            def count(at: Any, number: jax.Array) -> jax.Array:
                return number + (keys_ref[:, at] >= least).astype(jnp.int32)

            return over_lanes(total, fold(count, zero)) >= top_k

        return xla.bisect(is_enough, shape)

    least = lax.cond((wants & _BY_COUNT) != 0, most_likely_k, lambda: least_key)
    least = jnp.where(top_k > 0, least, least_key)

    def nucleus() -> jax.Array:
        half = arithmetic.WEIGHT_BITS // 2
        top = arithmetic.unkey(highest)

        def weigh(at: Any) -> jax.Array:
            keys = keys_ref[:, at]
            weights = arithmetic.weight(arithmetic.unkey(keys) - top)
            return jnp.where((keys >= least) & (keys > arithmetic.LEAST_KEY), weights, zero)

        def keep(at: Any, carry: None) -> None:
            for weights_ref in weights_refs:
                weights_ref[:, at] = weigh(at)

        if weights_refs:
            fold(keep, None)

        def mass(least: jax.Array) -> jax.Array:
            def add(at: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                weights = weights_refs[0][:, at] if weights_refs else weigh(at)
                above = jnp.where(keys_ref[:, at] >= least, weights, zero)
                high, low = sums
                return high + (above >> half), low + (above & (2**half - 1))

            high, low = fold(add, (zero, zero))
            return xla.mass_of(over_lanes(total, high), over_lanes(total, low))

        enough = arithmetic.product(mass(least_key), top_p)
        return xla.bisect(lambda least: mass(least) >= enough, shape)

    inner = lax.cond((wants & _BY_MASS) != 0, nucleus, lambda: least_key)
    least = jnp.where(top_p < 1, jnp.maximum(least, inner), least)
    floor = xla.min_p_key(arithmetic.unkey(highest), min_p)
    return jnp.minimum(jnp.maximum(least, floor), highest)
