"""``masked_head``: the right tokens of exact products, and its time by how much of the head is read."""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_check import calls, masks, measure
from benchmarks.gpu_check import masked_sample as sampling
from benchmarks.gpu_check.rows import CheckFailed, Recorder
from benchmarks.gpu_check.scale import Scale

MODES = ("greedy", "temperature", "all filters")
EXTENTS = ("half", "2 tiles")


@functools.lru_cache(maxsize=1)  # the cases of a size follow one another
def operands(vocab_size: int, features: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and a head of integers so small that every product and sum is exact."""
    rng = np.random.default_rng(0)
    shape = (sampling.BATCH, sampling.QUERIES, features)
    hidden = rng.integers(-2, 3, size=shape).astype(jnp.dtype(dtype))
    head = rng.integers(-2, 3, size=(vocab_size, features)).astype(jnp.dtype(dtype))
    return hidden, head


def conditions(extent: str, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As in ``masked_sample``, or with all rows under grammars that allow tokens of two tiles only."""
    words, enabled, positions = sampling.conditions(vocab_size)
    if extent == "2 tiles":
        legal = masks.legal_in_tiles(2, words[..., 0].size, vocab_size)
        words = masks.pack(legal).reshape(words.shape)
        enabled = np.ones_like(enabled)
    return words, enabled, positions


def check(recorder: Recorder, scale: Scale) -> None:
    """Every dtype, vocabulary, mode and extent of the masks, by every implementation."""
    for vocab_size, dtype in itertools.product(scale.check_vocabularies, scale.check_dtypes):
        heads = {
            name: (jax.jit(calls.kernel("masked_head", each, scale.interpret)), device)
            for name, (each, device) in calls.places(scale.interpret).items()
        }
        for extent, mode in itertools.product(EXTENTS, MODES):
            one = functools.partial(_check_one, heads, scale, vocab_size, dtype, extent, mode)
            recorder.run(f"{dtype}, V={vocab_size}, {extent}, {mode}", one)


def _check_one(
    heads: Mapping[str, tuple[Any, jax.Device]],
    scale: Scale,
    vocab_size: int,
    dtype: str,
    extent: str,
    mode: str,
) -> Mapping[str, float]:
    hidden, head = operands(vocab_size, scale.check_hidden, dtype)
    words, enabled, positions = conditions(extent, vocab_size)
    rows = sampling.rows_of(mode, sampling.BATCH)
    wanted = None
    if mode == "greedy":
        logits = hidden.astype(np.float32) @ head.astype(np.float32).T  # exact, too
        wanted = sampling.greedy_tokens(logits, words, enabled)
    read: dict[str, float] = {}
    for name in reversed(list(heads)):
        function, device = heads[name]
        tokens, rows_read = calls.run_on(
            device, function, hidden, head, words, enabled, positions, rows
        )[:2]
        sampling.require_legal(tokens, words, enabled, vocab_size)
        wanted = tokens if wanted is None else wanted
        calls.require_same_bits(tokens, wanted, f"tokens of {name}")
        read[f"rows read, {name}"] = int(rows_read)
        few = name == "triton" and extent == "2 tiles" and mode != "all filters"
        most = min(vocab_size, 4 * masks.TILE) if few else vocab_size
        if not 0 < rows_read <= most:
            raise CheckFailed(f"{name} says that it read {rows_read} of {vocab_size} rows")
    return read


def plain(hidden: jax.Array, head: jax.Array, *conditions: Any) -> jax.Array:
    """What one would write without a kernel: all logits, then mask and argmax."""
    logits = jnp.einsum("bnd,vd->bnv", hidden, head, preferred_element_type=jnp.float32)
    tokens: jax.Array = sampling.plain(logits, *conditions)
    return tokens


def time(recorder: Recorder, scale: Scale, bandwidth: float) -> None:
    """A head in bfloat16, greedy: half of the tokens of all tiles legal, of a tenth, and of two."""
    normal = jax.jit(
        lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1
    )
    head = normal(jax.random.key(0), (scale.vocabulary, scale.hidden))
    sizes = []
    for batch in scale.head_batches:
        hidden = normal(jax.random.key(1), (batch, 1, scale.hidden))
        sizes.append(_size(recorder, scale, bandwidth, hidden, head))
    measure.time_sizes(sizes, recorder.seconds_left)


def _size(
    recorder: Recorder, scale: Scale, bandwidth: float, hidden: jax.Array, head: jax.Array
) -> measure.Size:
    batch = hidden.shape[0]
    tiles = -(-scale.vocabulary // masks.TILE)
    active = {"all tiles": tiles, "10 % of tiles": max(1, tiles // 10), "2 tiles": 2}
    ones = jnp.ones((batch, 1), jnp.int32)
    rows = jax.tree.map(jnp.asarray, sampling.timed_rows("greedy", batch))

    shared = {}
    for name, count in active.items():
        legal = masks.legal_in_tiles(count, batch, scale.vocabulary)
        shared[name] = (head, jnp.asarray(masks.pack(legal))[:, None, :], ones, ones, rows)

    def program(function: Callable[..., Any]) -> measure.Repeated:
        # The head alone exceeds the L2 cache. Two tiles of it do not, whatever is done about it.
        turns = measure.copies(hidden, scale.least_calls)
        return measure.Repeated(function, turns, shared["all tiles"])

    functions = {"xla": calls.kernel("masked_head", "xla", False), "xla, plain": plain}
    if not scale.interpret:
        functions = {"triton": calls.kernel("masked_head", "triton", False), **functions}

    def figures(made: measure.Made, name: str, extent: str) -> Mapping[str, float]:
        timed = measure.time_made(made[name], scale, shared[extent])
        tokens = min(scale.vocabulary, active[extent] * masks.TILE)
        moved = {"active tiles": tokens * scale.hidden * head.dtype.itemsize}
        return timed | measure.shares(timed["us"], moved, bandwidth)

    def record(made: measure.Made) -> None:
        for extent, name in itertools.product(active, made):
            one = functools.partial(figures, made, name, extent)
            recorder.run(f"{name}, B={batch}, {extent}", one, "measured")

    programs = {name: functools.partial(program, function) for name, function in functions.items()}
    return programs, record
