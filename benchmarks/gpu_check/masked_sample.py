"""``masked_sample``: the same tokens as plain XLA, on the card and on the CPU, and its time."""

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
from pallas_kernels.masked_sample import Rows

BATCH, QUERIES = 8, 2
MODES = ("greedy", "temperature", "top-k", "top-p", "min-p", "all filters")
_EMPTY, _FREE = 3, 5
"""Rows without a legal token and without a grammar."""


def rows_of(mode: str, batch: int) -> Rows:
    """How the rows of a batch sample; beside random rows there is always a greedy one."""
    rows = Rows(
        temperature=np.linspace(0.5, 1.5, batch, dtype=np.float32),
        top_k=np.zeros(batch, np.int32),
        top_p=np.ones(batch, np.float32),
        min_p=np.zeros(batch, np.float32),
        seed=np.arange(batch, dtype=np.uint32) * np.uint32(2654435761),
    )
    rows.temperature[0] = 0.0
    if mode == "greedy":
        rows.temperature[:] = 0.0
    if mode in ("top-k", "all filters"):
        rows.top_k[:] = np.arange(batch) * 7
    if mode in ("top-p", "all filters"):
        rows.top_p[:] = np.linspace(0.3, 1.0, batch)
    if mode in ("min-p", "all filters"):
        rows.min_p[:] = np.linspace(0.0, 0.2, batch)
    return rows


def conditions(vocab_size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words ``[B,N,W]``, enabled and positions ``[B,N]``: many legal tokens, few, none, no grammar."""
    rng = np.random.default_rng(seed)
    share = np.linspace(0.9, 0.02, BATCH)[:, None, None]
    words = masks.pack(rng.random((BATCH, QUERIES, vocab_size)) < share)
    words[_EMPTY] = 0
    enabled = np.ones((BATCH, QUERIES), np.int32)
    words[_FREE], enabled[_FREE] = 0, 0
    positions = rng.integers(0, 10_000, size=(BATCH, QUERIES)).astype(np.int32)
    return words, enabled, positions


def logits_of(vocab_size: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Logits with ties (16 bits make many), infinities and NaN."""
    rng = np.random.default_rng(seed)
    logits = (4 * rng.normal(size=(BATCH, QUERIES, vocab_size))).astype(jnp.dtype(dtype))
    logits[1, 0, ::7], logits[2, 0, ::5], logits[4, 1, ::3] = np.nan, np.inf, -np.inf
    return logits


def require_legal(tokens: np.ndarray, words: np.ndarray, enabled: np.ndarray, size: int) -> None:
    """Raises:
    CheckFailed: a token that its row does not allow, or not 0 where there is none.
    """
    legal = masks.unpack(words, size) | (enabled[..., None] == 0)
    for row in np.ndindex(tokens.shape):
        token = int(tokens[row])
        if not 0 <= token < size or not (legal[row][token] if legal[row].any() else token == 0):
            raise CheckFailed(f"row {row}: token {token} is not legal")


def greedy_tokens(logits: np.ndarray, words: np.ndarray, enabled: np.ndarray) -> np.ndarray:
    """int32 ``[B,N]``: the first of the most likely legal tokens, 0 if none is legal."""
    finite = np.nan_to_num(
        logits.astype(np.float64),
        nan=float(np.finfo(np.float32).min),
        posinf=float(np.finfo(np.float32).max),
        neginf=float(np.finfo(np.float32).min),
    )
    legal = masks.unpack(words, logits.shape[-1]) | (enabled[..., None] == 0)
    return np.where(legal, finite, -np.inf).argmax(axis=-1).astype(np.int32)


def check(recorder: Recorder, scale: Scale) -> None:
    """Every dtype, vocabulary and mode, by every implementation, against the first that runs."""
    for vocab_size, dtype in itertools.product(scale.check_vocabularies, scale.check_dtypes):
        samplers = {
            name: (jax.jit(calls.kernel("masked_sample", each, scale.interpret)), device)
            for name, (each, device) in calls.places(scale.interpret).items()
        }
        for mode in MODES:
            one = functools.partial(_check_one, samplers, vocab_size, dtype, mode)
            recorder.run(f"{dtype}, V={vocab_size}, {mode}", one)


def _check_one(
    samplers: Mapping[str, tuple[Any, jax.Device]], vocab_size: int, dtype: str, mode: str
) -> Mapping[str, float]:
    words, enabled, positions = conditions(vocab_size)
    logits, rows = logits_of(vocab_size, dtype), rows_of(mode, BATCH)
    wanted = greedy_tokens(logits, words, enabled) if mode == "greedy" else None
    # The definition first: what differs from it is named.
    for name in reversed(list(samplers)):
        sampler, device = samplers[name]
        tokens = calls.run_on(device, sampler, logits, words, enabled, positions, rows)
        require_legal(tokens, words, enabled, vocab_size)
        wanted = tokens if wanted is None else wanted
        calls.require_same_bits(tokens, wanted, f"tokens of {name}")
    return {"wrong": 0}


def plain(
    logits: jax.Array,
    words: jax.Array,
    enabled: jax.Array,
    positions: jax.Array,
    rows: Rows,
    *,
    mode: str = "greedy",
) -> jax.Array:
    """What one would write without a kernel: mask, then argmax or ``jax.random.categorical``."""
    del enabled, positions
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.int32)[None, None, None, :]) & 1
    legal = bits.reshape(*words.shape[:2], -1)[..., : logits.shape[-1]] != 0
    masked = jnp.where(legal, logits, -jnp.inf)
    if mode == "greedy":
        return jnp.argmax(masked, axis=-1).astype(jnp.int32)
    scaled = masked / rows.temperature[:, None, None]
    tokens = jax.random.categorical(jax.random.key(rows.seed[0]), scaled, axis=-1)
    return tokens.astype(jnp.int32)


def time(recorder: Recorder, scale: Scale, bandwidth: float) -> None:
    """The Triton kernel, the portable implementation and what a user would write."""
    sizes = [_size(recorder, scale, bandwidth, batch) for batch in scale.batches]
    measure.time_sizes(sizes, recorder.seconds_left)


def timed_rows(mode: str, batch: int) -> Rows:
    """Rows that are all greedy, or all random with temperature 0.8."""
    rows = rows_of("greedy", batch)
    if mode == "temperature":
        rows.temperature[:] = 0.8
    return rows


def _size(recorder: Recorder, scale: Scale, bandwidth: float, batch: int) -> measure.Size:
    legal = masks.legal_tokens("half", batch, scale.vocabulary)[:, None, :]
    words, ones = jnp.asarray(masks.pack(legal)), jnp.ones((batch, 1), jnp.int32)
    shape = (batch, 1, scale.vocabulary)
    logits = jax.jit(lambda key: jax.random.normal(key, shape))(jax.random.key(0))
    calls_of = measure.calls_for(
        logits.nbytes, scale, most=8
    )  # its conditionals are slow to compile
    turns = measure.copies(logits, calls_of)
    shared = {
        mode: (words, ones, ones, jax.tree.map(jnp.asarray, timed_rows(mode, batch)))
        for mode in ("greedy", "temperature")
    }

    def program(function: Callable[..., Any]) -> measure.Repeated:
        return measure.Repeated(function, turns, shared["greedy"])

    functions = {"xla": calls.kernel("masked_sample", "xla", False)}
    if not scale.interpret:
        functions = {"triton": calls.kernel("masked_sample", "triton", False), **functions}
    functions |= {f"plain {mode}": functools.partial(plain, mode=mode) for mode in shared}
    moved = {"logits and words": logits.nbytes + words.nbytes}

    def figures(made: measure.Made, program: str, mode: str) -> Mapping[str, float]:
        timed = measure.time_made(made[program], scale, shared[mode])
        return timed | measure.shares(timed["us"], moved, bandwidth)

    def record(made: measure.Made) -> None:
        for program_name, mode in itertools.product(made, shared):
            name, _, only = program_name.partition(" ")
            if only in ("", mode):
                name = "xla, plain" if only else name
                one = functools.partial(figures, made, program_name, mode)
                recorder.run(names.sample(name, batch, mode), one, "measured")

    programs = {name: functools.partial(program, function) for name, function in functions.items()}
    return programs, record
