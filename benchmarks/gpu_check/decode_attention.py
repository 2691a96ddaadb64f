"""``decode_attention``: against NumPy in float64, and its time by how full the cache is."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_check import calls, measure
from benchmarks.gpu_check.rows import CheckFailed, Recorder
from benchmarks.gpu_check.scale import Scale
from pallas_kernels.decode_attention import LOWEST

TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
"""Of outputs and slot sums, absolute; values are of unit variance. The LSE gets 1e-4, or as much."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A bounded cache, as ``gkv_jax`` fills it, and what is asked of it."""

    name: str
    dtype: str = "float32"
    n: int = 1
    groups: int = 4
    prefix: int = 0
    rotations: int = 1
    per_head: bool = False
    learned_sinks: bool = False
    soft_cap: float | None = None
    lengths: tuple[int, ...] = (3000, 30)
    """Tokens that each row has seen: the ring has wrapped, or is nearly empty."""


CASES = (
    Case("ring"),
    Case("prefix, two rotations", prefix=4, rotations=2),
    Case("kept per head, drafts", prefix=20, rotations=2, per_head=True, n=5),
    Case("learned sinks", learned_sinks=True),
    Case("soft cap", soft_cap=2.0),
    Case("bfloat16", dtype="bfloat16", prefix=4, rotations=2, groups=4),
    Case("float16", dtype="float16", prefix=4, rotations=2, n=3),
    Case("one head a group", groups=1),
    Case("a row that sees nothing", lengths=(3000, 0)),
)
KV_HEADS = 2


@dataclasses.dataclass(frozen=True)
class Operands:
    """Arrays of a call; ``sinks`` may be None."""

    queries: tuple[np.ndarray, ...]
    k: np.ndarray
    v: np.ndarray
    slot_pos: np.ndarray
    positions: np.ndarray
    sinks: np.ndarray | None
    window: int


def operands(case: Case, capacity: int, dim: int) -> Operands:
    """Random queries, keys and values, and the positions that a ring behind a prefix holds."""
    rng = np.random.default_rng(0)
    batch, ring = len(case.lengths), capacity - case.prefix
    slot_pos = np.full((batch, KV_HEADS, capacity), -1, np.int32)
    for b, length in enumerate(case.lengths):
        slot_pos[b, :, : min(case.prefix, length)] = np.arange(min(case.prefix, length))
        for position in range(max(case.prefix, length - ring), length):
            slot_pos[b, :, case.prefix + (position - case.prefix) % ring] = position
        if case.per_head:
            for head in range(KV_HEADS):
                live = rng.random(case.prefix) < 0.5 * head + 0.4
                slot_pos[b, head, : case.prefix] = np.where(
                    live, np.arange(case.prefix) * (head + 1), -1
                )
    positions = np.asarray(case.lengths)[:, None] + np.arange(-case.n, 0)[None, :]
    heads, dtype = KV_HEADS * case.groups, jnp.dtype(case.dtype)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(dtype)

    cache = (batch, KV_HEADS, capacity, dim)
    return Operands(
        queries=tuple(normal(batch, case.n, heads, dim) for _ in range(case.rotations)),
        k=normal(*cache),
        v=normal(*cache),
        slot_pos=slot_pos if case.per_head else slot_pos[:, 0],
        positions=positions.astype(np.int32),
        sinks=rng.normal(size=heads).astype(np.float32) if case.learned_sinks else None,
        window=ring - case.n + 1,
    )


def oracle(case: Case, given: Operands) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs, LSE (``LOWEST`` where nothing is visible) and slot sums, float64."""
    batch, n, heads, dim = given.queries[0].shape
    k, v = given.k.astype(np.float64), given.v.astype(np.float64)

    def scores(queries: np.ndarray) -> np.ndarray:
        by_head = queries.astype(np.float64).reshape(batch, n, KV_HEADS, case.groups, dim)
        return np.einsum("bnhgd,bhcd->bnhgc", by_head, k) / np.sqrt(dim)

    in_prefix = np.arange(k.shape[2]) < case.prefix
    score = np.where(in_prefix, scores(given.queries[-1]), scores(given.queries[0]))
    if case.soft_cap is not None:
        score = case.soft_cap * np.tanh(score / case.soft_cap)
    held = given.slot_pos if given.slot_pos.ndim == 3 else given.slot_pos[:, None, :]
    held = held[:, None, :, None, :]
    at = given.positions[:, :, None, None, None]
    seen = (held >= 0) & (held <= at) & (in_prefix | (held > at - given.window))
    weights = np.where(seen, np.exp(score), 0.0)  # of unit-variance scores: no overflow
    total = weights.sum(axis=-1)
    if given.sinks is not None:
        total = total + np.exp(given.sinks.astype(np.float64)).reshape(KV_HEADS, case.groups)
    shares = weights / np.maximum(total, 1e-300)[..., None]
    out = np.einsum("bnhgc,bhcd->bnhgd", shares, v).reshape(batch, n, heads, dim)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, np.log(total), LOWEST).reshape(batch, n, heads)
    return out, lse, shares.sum(axis=3)


def check(recorder: Recorder, scale: Scale) -> None:
    """Every case and head dimension, by every implementation; float32 products in full precision."""
    for name, (implementation, device) in calls.places(scale.interpret).items():
        attend = calls.kernel("decode_attention", implementation, scale.interpret)
        for dim, case in itertools.product(scale.check_dims, CASES):
            one = functools.partial(_check_one, name, attend, device, case, scale, dim)
            recorder.run(f"{name}, D={dim}, {case.name}", one)


def _check_one(
    name: str,
    attend: Callable[..., Any],
    device: jax.Device,
    case: Case,
    scale: Scale,
    dim: int,
) -> Mapping[str, float]:
    given = operands(case, scale.check_capacity, dim)
    function = functools.partial(
        attend, prefix=case.prefix, window=given.window, soft_cap=case.soft_cap,
        return_lse=True, return_slot_sums=True,
    )  # fmt: skip
    # XLA's products of float32 would be TF32. The kernel says itself what it wants.
    precision = None if name == "triton" else "highest"
    with jax.default_matmul_precision(precision):
        attended = calls.run_on(
            device,
            jax.jit(lambda *arrays: function(*arrays[:5], sinks=arrays[5])),
            given.queries, given.k, given.v, given.slot_pos, given.positions, given.sinks,
        )  # fmt: skip
    tolerance = TOLERANCES[case.dtype]
    errors: dict[str, float] = {}
    wrong = []
    limits = {"out": tolerance, "lse": max(tolerance, 1e-4), "slot sums": tolerance}
    for (output, limit), actual, wanted in zip(
        limits.items(), attended, oracle(case, given), strict=True
    ):
        error = np.abs(actual.astype(np.float64) - wanted).max()
        errors[f"{output} error"] = float(error)
        if not error <= limit:  # NaN, too
            wrong.append(f"{output} is off by {error:.2g}, more than {limit:g}")
    if wrong:
        raise CheckFailed("; ".join(wrong))
    return errors


def plain(
    q: jax.Array, k: jax.Array, v: jax.Array, slot_pos: jax.Array, positions: jax.Array
) -> Any:
    """What one would write without a kernel: two einsums around a masked softmax."""
    batch, n, _, dim = q.shape
    by_head = q.reshape(batch, n, k.shape[1], -1, dim)
    scores = jnp.einsum("bnhgd,bhcd->bhngc", by_head, k, preferred_element_type=jnp.float32)
    held, at = slot_pos[:, None, None, None, :], positions[:, None, :, None, None]
    scores = jnp.where((held >= 0) & (held <= at), scores * dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhngc,bhcd->bnhgd", weights, v).reshape(q.shape)


def time(recorder: Recorder, scale: Scale, bandwidth: float) -> None:
    """One query a row in bfloat16, one rotation, by B, C and D; the cache full and a tenth full."""
    each = itertools.product(scale.dims, scale.capacities, scale.batches)
    sizes = [_size(recorder, scale, bandwidth, *size) for size in each]
    measure.time_sizes(sizes, recorder.seconds_left)


def _size(
    recorder: Recorder, scale: Scale, bandwidth: float, dim: int, capacity: int, batch: int
) -> measure.Size:
    @jax.jit
    def normal(key: jax.Array) -> tuple[jax.Array, ...]:
        cache = (batch, scale.kv_heads, capacity, dim)
        shapes = (batch, 1, scale.heads, dim), cache, cache
        return tuple(jax.random.normal(key, shape, jnp.bfloat16) for shape in shapes)

    arrays = normal(jax.random.key(0))
    fills = {"full": capacity, "a tenth full": capacity // 10}
    shared = {}
    for name, tokens in fills.items():
        held = np.where(np.arange(capacity) < tokens, np.arange(capacity), -1).astype(np.int32)
        at = jnp.full((batch, 1), tokens - 1, jnp.int32)
        shared[name] = (jnp.broadcast_to(jnp.asarray(held)[None, :], (batch, capacity)), at)
    cache_bytes = arrays[1].nbytes + arrays[2].nbytes
    turns = measure.copies(arrays, measure.calls_for(cache_bytes, scale))

    def ours(implementation: Any) -> Callable[..., Any]:
        attend = calls.kernel("decode_attention", implementation, False)

        def function(turn: Any, *shared: Any) -> Any:
            q, k, v = turn
            return attend((q,), k, v, *shared, prefix=0, window=capacity).out

        return function

    def users(turn: Any, *shared: Any) -> Any:
        return plain(*turn, *shared)

    def program(function: Callable[..., Any]) -> measure.Repeated:
        return measure.Repeated(function, turns, shared["full"])

    functions = {"xla": ours("xla"), "xla, plain": users}
    if not scale.interpret:
        functions = {"triton": ours("triton"), **functions}

    def figures(made: measure.Made, name: str, fill: str) -> Mapping[str, float]:
        timed = measure.time_made(made[name], scale, shared[fill])
        # What plain XLA reads does not depend on how full the cache is.
        share = fills[fill] / capacity if name == "triton" else 1.0
        return timed | measure.shares(timed["us"], {"K and V": int(share * cache_bytes)}, bandwidth)

    def record(made: measure.Made) -> None:
        for name, fill in itertools.product(made, fills):
            one = functools.partial(figures, made, name, fill)
            recorder.run(f"{name}, B={batch}, C={capacity}, D={dim}, {fill}", one, "measured")

    programs = {name: functools.partial(program, function) for name, function in functions.items()}
    return programs, record
