"""How long a kernel takes on a device that is always busy.

A kernel here runs for microseconds, and starting a program from Python takes longer than that. So
one jitted program holds the kernel many times. ``lax.optimization_barrier`` puts each call behind the
one before it and keeps XLA from merging them; the calls take arrays in turns that together do not fit
into the L2 cache. Then such programs are enqueued one after the other and waited for once, at the
end: while one runs, the next are being started. Time over calls is what a call costs in a stream of
others, gaps between kernels included. The median of several rounds counts.

``enqueue`` in the figures is what enqueueing a program takes, as a share of the time per program. Near
1 or above it, the device waited for the host, and the figure says more of the host than of the kernel.
Only the first few of a round count for it: JAX lets no more than 32 wait, and blocks.

The yardstick is a copy of a large array, x + 1, measured the same way: bytes read plus bytes written.
"""

import concurrent.futures
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.gpu_check.rows import NoTime
from benchmarks.gpu_check.scale import Scale

MOST_CALLS = 16
"""Of one program. More of them would take longer to compile than to measure."""
_MOST_RUNS = 2000
_ENQUEUED_FREELY = 16


def calls_for(num_bytes: int, scale: Scale, most: int = MOST_CALLS) -> int:
    """Calls of one program, on as many arrays of ``num_bytes``, so that they exceed the L2 cache."""
    return max(scale.least_calls, min(most, -(-scale.rotate_bytes // max(num_bytes, 1))))


def time_runs(
    run: Callable[[], Any], wait: Callable[[Any], Any], calls: int, scale: Scale
) -> dict[str, float]:
    """Microseconds per call of ``run``, which enqueues ``calls`` of them; ``wait`` blocks on a result.

    For any framework. Figures: ``us``, ``lowest_us`` of the rounds, ``enqueue``.
    """
    for _ in range(2):
        wait(run())
    began = time.perf_counter()
    wait(run())
    once = time.perf_counter() - began
    runs = max(3, min(_MOST_RUNS, round(scale.round_seconds / max(once, 1e-6))))
    freely = min(runs, _ENQUEUED_FREELY)
    rounds, enqueues = [], []
    for _ in range(scale.rounds):
        began = time.perf_counter()
        for _ in range(freely):
            result = run()
        enqueued = time.perf_counter()
        for _ in range(runs - freely):
            result = run()
        wait(result)
        ended = time.perf_counter()
        rounds.append(ended - began)
        enqueues.append((enqueued - began) / freely / ((ended - began) / runs))
    each = 1e6 / (runs * calls)
    return {
        "us": statistics.median(rounds) * each,
        "lowest_us": min(rounds) * each,
        "enqueue": statistics.median(enqueues),
    }


class Repeated:
    """A program that calls a function once for each of several operands, one after the other."""

    def __init__(
        self,
        function: Callable[..., Any],
        turns: Sequence[Any],
        shared: tuple[Any, ...] = (),
        *,
        in_place: bool = False,
    ) -> None:
        """The program of ``function(turn, *shared)`` for all of ``turns``.

        ``in_place`` donates the turns, and takes the results for them the next time.
        """
        self._turns, self._shared, self._in_place = list(turns), shared, in_place

        def run(turns: list[Any], shared: tuple[Any, ...]) -> list[Any]:
            results: list[Any] = []
            before: Any = jnp.zeros((), jnp.int32)
            for turn in turns:
                turn, operands, _ = lax.optimization_barrier((turn, shared, before))
                before = function(turn, *operands)
                results.append(before)
            return results

        self._jitted = jax.jit(run, donate_argnums=(0,) if in_place else ())
        self._compiled: Any = None

    def compile(self) -> None:
        self._compiled = self._jitted.lower(self._turns, self._shared).compile()

    def time(self, scale: Scale, shared: tuple[Any, ...] | None = None) -> dict[str, float]:
        """See ``time_runs``; with other shared operands of the same shapes, if given.

        The program must have been compiled.
        """
        if shared is not None:
            self._shared = shared
        return time_runs(self._run, jax.block_until_ready, len(self._turns), scale)

    def _run(self) -> Any:
        results = self._compiled(self._turns, self._shared)
        if self._in_place:
            self._turns = results
        return results


def compile_all(
    programs: Mapping[str, Callable[[], Repeated]], seconds: float, threads: int = 8
) -> dict[str, Repeated | Exception]:
    """Build and compile programs side by side; XLA leaves Python alone while it compiles.

    Nothing is measured meanwhile: the compiler tries out variants on the device. A program that fails
    is its exception; one that is not ready after ``seconds`` a ``NoTime``.
    """

    def build(make: Callable[[], Repeated]) -> Repeated:
        program = make()
        program.compile()
        return program

    until = time.perf_counter() + seconds
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    futures = {name: pool.submit(build, make) for name, make in programs.items()}
    done: dict[str, Repeated | Exception] = {}
    for name, future in futures.items():
        try:
            done[name] = future.result(timeout=max(0.0, until - time.perf_counter()))
        except concurrent.futures.TimeoutError:
            done[name] = NoTime("not compiled in time")
        except Exception as error:
            done[name] = error
    pool.shutdown(wait=False, cancel_futures=True)
    return done


Made = Mapping[str, Repeated | Exception]
Size = tuple[Mapping[str, Callable[[], Repeated]], Callable[[Made], None]]
"""The programs of one size by name, and what measures them once they are compiled."""


def time_sizes(sizes: Sequence[Size], seconds_left: float) -> None:
    """Compiles the programs of all sizes side by side, then measures size by size, in their order.

    Compiling gets the larger part of the time that is left, and seldom needs it.
    """
    programs = {
        f"{i} {name}": make
        for i, (of_size, _) in enumerate(sizes)
        for name, make in of_size.items()
    }
    made = compile_all(programs, 0.7 * seconds_left)
    for i, (of_size, measure_size) in enumerate(sizes):
        measure_size({name: made[f"{i} {name}"] for name in of_size})


def time_made(
    made: Repeated | Exception, scale: Scale, shared: tuple[Any, ...] | None = None
) -> dict[str, float]:
    """Times what ``compile_all`` gave.

    Raises:
      Exception: why it could not be compiled.
    """
    if isinstance(made, Exception):
        raise made
    return made.time(scale, shared)


def copies(array: Any, count: int) -> list[Any]:
    """``count`` arrays on the device with the content of ``array`` (or of a tuple of arrays)."""
    return [jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), array) for _ in range(count)]


def copy_bandwidth(scale: Scale) -> float:
    """Gigabytes per second, read plus written, of a copy that adds 1."""
    array = jnp.zeros((scale.copy_bytes // 4,), jnp.float32)
    program = Repeated(lambda x: x + 1.0, [array] * 2)
    program.compile()
    return 2 * scale.copy_bytes / program.time(scale)["us"] / 1e3


def shares(us: float, moved: Mapping[str, int], bandwidth: float) -> dict[str, float]:
    """Fractions of the copy's bandwidth (in GB/s) by each way of counting, as ``stored of copy``."""
    return {f"{name} of copy": count / us / 1e3 / bandwidth for name, count in moved.items()}
