"""``apply_token_bitmask``: bit by bit against NumPy, and its time."""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_check import calls, masks, measure, names
from benchmarks.gpu_check.rows import CheckFailed, Recorder
from benchmarks.gpu_check.scale import Scale
from pallas_kernels.bitmask import masked_logit

_ENABLED = (1, 1, 0, 1, 0, 1)


def operands(vocab_size: int, dtype: str, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Logits with special values, masks with anything beyond V, rows on and off."""
    rng = np.random.default_rng(seed)
    rows = len(_ENABLED)
    logits = rng.normal(size=(rows, vocab_size)).astype(jnp.dtype(dtype))
    logits[:, :4] = np.asarray([np.nan, np.inf, -np.inf, -0.0])
    words = masks.pack(rng.random((rows, vocab_size)) < 0.5)
    words[0], words[1], words[2] = -1, 0, 0
    if tail := vocab_size % 32:
        words[3:, -1] |= np.int32(-1) << np.int32(tail)
    return logits, words, np.asarray(_ENABLED, np.int32)


def reference(logits: np.ndarray, words: np.ndarray, enabled: np.ndarray) -> np.ndarray:
    """Token by token from the bytes of the mask."""
    legal = masks.unpack(words, logits.shape[-1]) | (enabled[:, None] == 0)
    lowest = np.asarray(masked_logit(logits.dtype), logits.dtype)
    return np.where(legal, logits, lowest)


def check(recorder: Recorder, scale: Scale) -> None:
    """Every dtype and vocabulary, by every implementation; and that nothing is copied."""
    recorder.run("triton, in place", functools.partial(_in_place, scale))
    for vocab_size, dtype in itertools.product(scale.check_vocabularies, scale.check_dtypes):
        for name, (implementation, device) in calls.places(scale.interpret).items():
            mask = calls.kernel("bitmask", implementation, scale.interpret)
            one = functools.partial(_check_one, jax.jit(mask), device, vocab_size, dtype)
            recorder.run(f"{name}, {dtype}, V={vocab_size}", one)


def _check_one(
    mask: Callable[..., Any], device: jax.Device, vocab_size: int, dtype: str
) -> Mapping[str, float]:
    given = operands(vocab_size, dtype)
    calls.require_same_bits(calls.run_on(device, mask, *given), reference(*given), "masked logits")
    return {"wrong": 0}


def _in_place(scale: Scale) -> Mapping[str, float]:
    given = operands(scale.check_vocabularies[0], "float32")
    mask = jax.jit(calls.kernel("bitmask", "triton", scale.interpret), donate_argnums=0)
    # Copies: an array that shares memory with NumPy's cannot be donated.
    (on_device,) = measure.copies(given, 1)
    memory = mask.lower(*on_device).compile().memory_analysis()
    if memory is None:
        raise CheckFailed("the program does not say where its results lie")
    if memory.alias_size_in_bytes != given[0].nbytes:
        raise CheckFailed(
            f"{memory.alias_size_in_bytes} of {given[0].nbytes} bytes lie in the operand"
        )
    before = on_device[0].unsafe_buffer_pointer()
    masked = mask(*on_device)
    if masked.unsafe_buffer_pointer() != before:
        raise CheckFailed("the result lies elsewhere than the donated logits")
    calls.require_same_bits(np.asarray(masked), reference(*given), "masked logits")
    return {"wrong": 0, "temporary bytes": memory.temp_size_in_bytes}


def plain(logits: jax.Array, words: jax.Array, enabled: jax.Array) -> jax.Array:
    """What one would write without a kernel: unpack, then ``jnp.where``."""
    del enabled
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]) & 1
    legal = bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]] != 0
    return jnp.where(legal, logits, masked_logit(logits.dtype))


def sizes(scale: Scale) -> list[tuple[int, str]]:
    """Batch and dtype of the timings."""
    return [(batch, "float32") for batch in scale.batches] + [(scale.batches[0], "bfloat16")]


def traffic(legal: np.ndarray, itemsize: int) -> dict[str, int]:
    """Bytes by three ways of counting.

    ``stored``: masked values and words, what a kernel in place cannot do without. ``sectors``: whole
    memory sectors with a masked value, and words. ``effective``: all logits read and written, as
    XGrammar counts.
    """
    rows, vocab_size = legal.shape
    words = 4 * rows * -(-vocab_size // 32)
    return {
        "stored": itemsize * int((~legal).sum()) + words,
        "sectors": masks.SECTOR_BYTES * masks.masked_sectors(legal, itemsize) + words,
        "effective": 2 * itemsize * legal.size,
    }


def time(recorder: Recorder, scale: Scale, bandwidth: float) -> None:
    """The Triton kernel and plain XLA, in place, by batch, dtype and mask."""
    every = [_size(recorder, scale, bandwidth, batch, dtype) for batch, dtype in sizes(scale)]
    measure.time_sizes(every, recorder.seconds_left)


def _size(
    recorder: Recorder, scale: Scale, bandwidth: float, batch: int, dtype: str
) -> measure.Size:
    itemsize = jnp.dtype(dtype).itemsize
    legal = {kind: masks.legal_tokens(kind, batch, scale.vocabulary) for kind in masks.KINDS}
    enabled = jnp.ones((batch,), jnp.int32)
    shared = {kind: (jnp.asarray(masks.pack(each)), enabled) for kind, each in legal.items()}
    logits = jnp.zeros((batch, scale.vocabulary), dtype)
    turns = measure.calls_for(logits.nbytes, scale)

    def program(function: Callable[..., Any]) -> measure.Repeated:
        return measure.Repeated(
            function, measure.copies(logits, turns), shared["half"], in_place=True
        )

    functions: dict[str, Callable[..., Any]] = {"xla, plain": plain}
    if not scale.interpret:
        functions = {"triton": calls.kernel("bitmask", "triton", False), **functions}

    def figures(made: measure.Made, name: str, kind: str) -> Mapping[str, float]:
        timed = measure.time_made(made[name], scale, shared[kind])
        moved = traffic(legal[kind], itemsize)
        if name != "triton":  # it reads and writes everything
            moved = {"effective": moved["effective"]}
        return timed | measure.shares(timed["us"], moved, bandwidth)

    def record(made: measure.Made) -> None:
        for name, kind in itertools.product(made, masks.KINDS):
            one = functools.partial(figures, made, name, kind)
            recorder.run(names.mask(name, batch, dtype, kind), one, "measured")

    programs = {name: functools.partial(program, function) for name, function in functions.items()}
    return programs, record
