"""``python -m benchmarks.long_context``: time and bytes of a decode step over the position in the text.

The step is that of ``device_loop`` (forward, LM head, sampling, ``commit``) without grammar and host. No
text is read up to a position: the cache is put into the state that it has there. Keys and values are
noise, the bookkeeping is real: rings that have wrapped, kept tokens from all over the text, in a full
cache every token. ``full`` and ``quest`` evict nothing and have, at each position, the capacity that a
text of that length needs; the bounded caches hold ``size`` tokens and run one compiled program at all
positions.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benchmarks.common import (
    RESULTS,
    interleaved,
    medians,
    print_table,
    print_verdict,
    warn_if_busy,
    write_json,
)
from gkv_jax import CacheSpec, UserError
from gkv_jax.cache import Cache, LayerCache, Layout, commit, init_cache
from gkv_jax.cache.quest import page_bounds
from gkv_jax.cache.segments import EMPTY, Slots, slots_of
from gkv_jax.cache.storage import encode, load
from gkv_jax.models.protocol import Decoder, Params
from gkv_jax.sampling import greedy_rows
from gkv_jax.step import StepInputs, choose, forward
from gkv_jax.weights import LoadedModel, load_model

SINKS = 4
INTERVAL = 32
"""Tokens between two choices where a policy does not choose at every token."""
MOST_GROWTH = 1.05
"""Target for each bounded cache: time of a step at the last position over that at the first."""

_NOISE = 1024  # distinct tokens in a cache: to make more would take longer than to time their steps

Point = tuple[str, int]
"""A cache by name, and a position."""


def bounded_specs(size: int) -> dict[str, CacheSpec]:
    """Caches of which a query sees ``size`` tokens, whatever the length of the text."""
    window = CacheSpec(sinks=SINKS, window=size - SINKS)
    half = size // 2

    def scored(policy: str, **options: Any) -> CacheSpec:
        kept = size - SINKS - half
        return CacheSpec(policy=policy, sinks=SINKS, kept=kept, window=half, **options)

    return {
        "window": window,
        "window bfloat16": dataclasses.replace(window, dtype="bfloat16"),
        "window int8": dataclasses.replace(window, dtype="int8"),
        "snapkv": scored("snapkv"),
        f"snapkv every {INTERVAL}": scored("snapkv", decode="snapkv", interval=INTERVAL),
        f"keydiff every {INTERVAL}": scored("keydiff", decode="keydiff", interval=INTERVAL),
        "h2o every 1": scored("h2o"),
        f"h2o every {INTERVAL}": scored("h2o", interval=INTERVAL),
        "tova every 1": scored("tova"),
    }


def growing_specs(size: int, tokens: int) -> dict[str, CacheSpec]:
    """Caches that hold a whole text of ``tokens``; a query of ``quest`` reads ``size`` of them."""
    quest = CacheSpec(policy="quest", sinks=0, window=tokens, budget=size)
    return {"full": CacheSpec.full(tokens), "quest": quest}


@functools.partial(jax.jit, static_argnames=("spec", "model", "batch", "dtype"))
def filled_cache(
    position: jax.Array, *, spec: CacheSpec, model: Decoder, batch: int, dtype: jnp.dtype
) -> Cache:
    """The cache of ``batch`` rows after ``position`` tokens of text (int32 scalar).

    No bounded layer may have room left, and no choice may be due: ``position`` is at least the
    tokens that a query sees, and a multiple of ``spec.interval``.
    """
    layout = Layout.of(spec, model)
    noise = jax.random.normal(
        jax.random.key(0), (batch, model.num_kv_heads, _NOISE, model.head_dim)
    )
    return Cache(
        layers=tuple(
            _filled_layer(layout.spec(index), layer, position, noise)
            for index, layer in enumerate(init_cache(spec, model, batch, dtype).layers)
        ),
        slots=tuple(_filled_slots(each, position, batch) for each in layout.specs),
    )


def _filled_slots(spec: CacheSpec, position: jax.Array, batch: int) -> Slots:
    before = position - jnp.arange(spec.window - 1)[::-1] - 1
    places = jnp.where(before >= spec.sinks, slots_of(spec, before), spec.capacity)
    # A live sink holds its position and a live kept slot its rank: both are the slot's own number.
    slot_pos = jnp.where(jnp.arange(spec.capacity) < spec.prefix, jnp.arange(spec.capacity), EMPTY)
    slot_pos = slot_pos.at[places].set(before, mode="drop")
    ring_start = jnp.maximum(position - spec.window + 1, spec.sinks)
    rows = [
        jnp.broadcast_to(each, (batch, *each.shape))
        for each in (slot_pos, jnp.int32(spec.prefix), ring_start)
    ]
    return Slots(*rows)


def _filled_layer(
    spec: CacheSpec, layer: LayerCache, position: jax.Array, noise: jax.Array
) -> LayerCache:
    """With ``noise [B,Hk,M,D]`` again and again for keys and values."""
    tokens = jnp.tile(noise, (1, 1, -(-spec.capacity // _NOISE), 1))[:, :, : spec.capacity]
    stored = encode(tokens, layer.k.data.dtype)
    layer = dataclasses.replace(layer, k=stored, v=stored)
    if layer.kept_pos is not None:  # evenly from what has left the window
        gone = position - spec.window + 1 - spec.sinks
        # In float: the product would leave int32 at long texts. Neighbours are further apart than 1.
        share = jnp.arange(spec.kept, dtype=jnp.float32) / spec.kept
        even = spec.sinks + (share * gone.astype(jnp.float32)).astype(jnp.int32)
        layer = dataclasses.replace(layer, kept_pos=jnp.broadcast_to(even, layer.kept_pos.shape))
    if layer.mass is not None:
        layer = dataclasses.replace(layer, mass=jnp.square(tokens[..., 0]))
    if layer.observed is not None:
        shape, dtype = layer.observed.shape, layer.observed.dtype
        observed = jax.random.normal(jax.random.key(1), shape).astype(dtype)
        layer = dataclasses.replace(layer, observed=observed)
    if layer.bounds is not None:
        bounds = page_bounds(load(layer.k, None, layer.bounds.dtype), spec.page)
        layer = dataclasses.replace(layer, bounds=bounds)
    return layer


@functools.partial(jax.jit, static_argnames=("model", "spec"), donate_argnames=("cache",))
def decode_steps(
    params: Params,
    cache: Cache,
    position: jax.Array,
    count: jax.Array,
    *,
    model: Decoder,
    spec: CacheSpec,
) -> Cache:
    """The cache after ``count`` greedy tokens from ``position`` on (int32 scalars), in every row."""
    batch = cache.slots[0].slot_pos.shape[0]
    # Free text: no mask is enabled.
    masks = jnp.zeros((batch, spec.queries, -(-model.vocab_size // 32) + 1), jnp.int32)
    sampling = jax.tree.map(jnp.asarray, greedy_rows(batch))
    first = StepInputs(
        tokens=jnp.ones((batch, spec.queries), jnp.int32),
        n_drafts=jnp.zeros(batch, jnp.int32),
        active=jnp.ones(batch, bool),
        logprobs=jnp.array(False),
        go=jnp.array(True),
        next_pos=jnp.broadcast_to(position, (batch,)),
    )

    def step(_: jax.Array, carry: tuple[Cache, StepInputs]) -> tuple[Cache, StepInputs]:
        cache, inputs = carry
        hidden, cache, pending = forward(params, cache, inputs, model=model, spec=spec)
        answer, next_pos = choose(
            params, hidden, inputs, masks, sampling, model=model, kernel=None, head="masked"
        )
        cache = commit(cache, pending, inputs.next_pos, next_pos, model=model, spec=spec)
        tokens = answer[:, : spec.queries]
        return cache, dataclasses.replace(inputs, tokens=tokens, next_pos=next_pos)

    after: Cache = jax.lax.fori_loop(0, count, step, (cache, first))[0]
    return after


class Bench:
    """One model and batch size: compiled once per spec, timed at any position."""

    def __init__(self, model: Decoder, params: Params, batch: int, steps: int) -> None:
        self._model, self._params = model, params
        self._batch, self._steps = batch, steps
        self._programs: dict[CacheSpec, Any] = {}

    def ms_per_step(self, spec: CacheSpec, position: int) -> float:
        """Milliseconds of a step, a mean over the steps from ``position`` on."""
        cache = jax.block_until_ready(self._cache(spec, position))
        program = self.program(spec)
        began = time.perf_counter()
        after = jax.block_until_ready(
            program(self._params, cache, np.int32(position), np.int32(self._steps))
        )
        elapsed = time.perf_counter() - began
        assert int(after.slots[0].slot_pos.max()) == position + self._steps - 1
        return 1e3 * elapsed / self._steps

    def bytes_after(self, spec: CacheSpec, position: int) -> int:
        """Bytes of the cache after a step at ``position``."""
        after: Cache = self.program(spec)(
            self._params, self._cache(spec, position), np.int32(position), np.int32(1)
        )
        return after.nbytes

    def temporary_bytes(self, spec: CacheSpec) -> int:
        """What the compiled steps need beside parameters and cache."""
        size: int = self.program(spec).memory_analysis().temp_size_in_bytes
        return size

    def program(self, spec: CacheSpec) -> Any:
        """``decode_steps``, compiled; neither position nor count is a part of it."""
        if spec not in self._programs:
            cache = jax.eval_shape(lambda: self._cache(spec, 0))
            self._programs[spec] = decode_steps.lower(
                self._params, cache, np.int32(0), np.int32(0), model=self._model, spec=spec
            ).compile()
        return self._programs[spec]

    def _cache(self, spec: CacheSpec, position: int) -> Cache:
        return filled_cache(
            np.int32(position),
            spec=spec,
            model=self._model,
            batch=self._batch,
            dtype=jnp.dtype(jnp.float32),
        )


def cases(size: int, positions: Sequence[int], steps: int) -> dict[Point, CacheSpec]:
    """The spec of every cache at every position."""
    bounded = bounded_specs(size)
    return {
        (name, position): spec
        for position in positions
        for name, spec in (growing_specs(size, position + steps) | bounded).items()
    }


def measure(bench: Bench, points: Mapping[Point, CacheSpec], repetitions: int) -> dict[str, Any]:
    """Samples and medians, bytes of caches and of temporary buffers; by name, then position."""
    measures: dict[Point, Callable[[], float]] = {
        point: functools.partial(bench.ms_per_step, spec, point[1])
        for point, spec in points.items()
    }
    samples = interleaved(measures, repetitions)
    return {
        "ms_per_step": _by_name(medians(samples)),
        "cache_bytes": _by_name(
            {point: bench.bytes_after(spec, point[1]) for point, spec in points.items()}
        ),
        "temporary_bytes": _by_name(
            {point: bench.temporary_bytes(spec) for point, spec in points.items()}
        ),
        "samples": _by_name(samples),
    }


def _by_name(values: Mapping[Point, Any]) -> dict[str, dict[int, Any]]:
    names = dict.fromkeys(name for name, _ in values)
    return {
        name: {position: value for (each, position), value in values.items() if each == name}
        for name in names
    }


def report(results: Mapping[str, Any], bounded: Sequence[str]) -> dict[str, dict[str, float]]:
    """Print tables and verdicts; return the ratios."""
    ms, sizes = results["ms_per_step"], results["cache_bytes"]
    temporary = results["temporary_bytes"]
    positions = list(ms["full"])
    first, last = positions[0], positions[-1]
    growth = {name: at[last] / at[first] for name, at in ms.items()}
    to_window = {name: at[last] / ms["window"][last] for name, at in ms.items()}
    print_table(
        "ms per step, median, by position",
        ["cache", *map(str, positions), f"{last} / {first}", f"to window, at {last}"],
        [
            [name, *_figures(at, 1), f"{growth[name]:.3f}", f"{to_window[name]:.3f}"]
            for name, at in ms.items()
        ],
    )
    print_table(
        f"MB of the cache, by position, and of temporary buffers at {last}",
        ["cache", *map(str, positions), "temporary"],
        [
            [name, *_figures(at, 1e6), f"{temporary[name][last] / 1e6:.2f}"]
            for name, at in sizes.items()
        ],
    )
    for name in bounded:
        print_verdict(f"{name}: time at {last} over {first}", growth[name], most=MOST_GROWTH)
        grown = max(sizes[name].values()) / min(sizes[name].values())
        print_verdict(f"{name}: most bytes over least", grown, most=1)
    return {"growth": growth, "to_window": to_window}


def _figures(at: Mapping[int, float], unit: float) -> list[str]:
    return [f"{value / unit:.2f}" for value in at.values()]


def plot(ms: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """Milliseconds per step over the position, one line a cache."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, at in ms.items():
        style = {"full": "k--", "quest": "k:"}.get(name, "-")
        axes.plot(list(at), list(at.values()), style, marker="o", markersize=3, label=name)
    positions = list(ms["full"])
    axes.set_xscale("log", base=2)
    axes.set_xticks(positions, labels=[str(position) for position in positions])
    axes.set(xlabel="position in the text (tokens)", ylabel="ms per step", ylim=(0, None))
    axes.legend(fontsize="small", ncols=2)
    axes.grid(alpha=0.3, which="both")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    print(f"written: {path}")


def run(
    loaded: LoadedModel,
    size: int,
    positions: Sequence[int],
    steps: int,
    batch: int,
    repetitions: int,
    folder: Path,
) -> None:
    """Measure, print, and write ``long_context.json`` and ``.png`` to ``folder``."""
    model = loaded.model
    bench = Bench(model, loaded.params, batch, steps)
    results = measure(bench, cases(size, positions, steps), repetitions)
    bounded = bounded_specs(size)
    ratios = report(results, list(bounded))
    write_json(
        "long_context",
        {
            "batch": batch,
            "size": size,
            "steps": steps,
            "caches": {name: dataclasses.asdict(spec) for name, spec in bounded.items()},
            "ratios": ratios,
            **results,
        },
        folder,
    )
    plot(results["ms_per_step"], folder / "long_context.png")


def main(
    positions: Annotated[str, typer.Option(help="comma-separated, ascending")] = (
        "1024,4096,16384,65536"
    ),
    steps: Annotated[int, typer.Option(help="timed in a row, a multiple of 32")] = INTERVAL,
    size: Annotated[int, typer.Option(help="tokens that a query of a bounded cache sees")] = 1024,
    batch: Annotated[int, typer.Option(help="rows", min=1)] = 1,
    repetitions: Annotated[int, typer.Option(help="timed rounds", min=1)] = 5,
    model: Annotated[str, typer.Option(help="name, folder, GGUF file or hub id")] = (
        "smollm2-135m-instruct"
    ),
    folder: Annotated[Path, typer.Option(help="where JSON and plot go")] = RESULTS,
) -> None:
    """Time decode steps of every kind of cache at several positions, in turns."""
    try:
        at = sorted(int(position) for position in positions.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"--positions is {positions}; give numbers") from error
    if steps < INTERVAL or steps % INTERVAL:  # else some policies choose less often than they do
        raise typer.BadParameter(f"--steps is {steps}; it must be a multiple of {INTERVAL}")
    if at[0] < size or any(position % INTERVAL for position in at):
        raise typer.BadParameter(
            f"--positions is {positions}; give multiples of {INTERVAL} from {size} (--size) on"
        )
    warn_if_busy()
    try:
        loaded = load_model(model, dtype="float32")
        run(loaded, size, at, steps, batch, repetitions, folder)
    except UserError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
