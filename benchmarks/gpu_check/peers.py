"""The same work in PyTorch with XGrammar's Triton kernel, where they are installed.

Measured like the rest (``measure.time_runs``): many calls on arrays in turns are one CUDA graph, and
graphs are enqueued one after the other. Without a GPU the calls are made one by one.
"""

import functools
import importlib.util
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.gpu_check import bitmask, masks, measure, names
from benchmarks.gpu_check.rows import Missing, Recorder, Status
from benchmarks.gpu_check.scale import Scale

Apply = Callable[[Any, Any], None]
_KERNEL = "kernels/apply_token_bitmask_inplace_triton.py"


def load(scale: Scale) -> tuple[Any, Apply]:
    """torch, and XGrammar's function that masks logits in place.

    Raises:
      Missing: something is not installed, or sees no GPU.
    """
    for name in ("torch", "xgrammar"):
        if importlib.util.find_spec(name) is None:
            raise Missing(f"{name} is not installed")
    import torch

    if scale.interpret:
        import xgrammar

        return torch, functools.partial(xgrammar.apply_token_bitmask_inplace, backend="cpu")
    if not torch.cuda.is_available():
        raise Missing("torch sees no GPU")
    return torch, _triton_kernel().apply_token_bitmask_inplace_triton


def _triton_kernel() -> ModuleType:
    """The kernel's module by its path: the package around it asks for more than a kernel needs."""
    package = importlib.util.find_spec("xgrammar")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / _KERNEL
    spec = importlib.util.spec_from_file_location("xgrammar_triton_kernel", path)
    if spec is None or spec.loader is None or not path.exists():
        raise Missing(f"this xgrammar has no {_KERNEL}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Repeated:
    """Calls of a function, one for each of several arrays, as one CUDA graph."""

    def __init__(self, torch: Any, function: Callable[[Any], Any], turns: Sequence[Any]) -> None:
        self._calls = len(turns)
        self._wait: Callable[[Any], Any] = lambda _: None

        def run() -> Any:
            return [function(turn) for turn in turns]

        self._run = run
        if turns[0].is_cuda:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):  # compiles, and allocates what a graph must not
                for _ in range(3):
                    run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._kept = run()
            self._run, self._wait = graph.replay, lambda _: torch.cuda.synchronize()

    def time(self, scale: Scale) -> dict[str, float]:
        """See ``measure.time_runs``."""
        return measure.time_runs(self._run, self._wait, self._calls, scale)


def time(recorder: Recorder, scale: Scale) -> None:
    """The copy, the mask alone, and mask with sampling, by the names of our own rows."""
    try:
        torch, apply = load(scale)
    except Exception as error:
        status: Status = "missing" if isinstance(error, Missing) else "error"
        recorder.write("torch and xgrammar", status, detail=f"{type(error).__name__}: {error}")
        return
    device = "cpu" if scale.interpret else "cuda"
    bandwidth = [float("nan")]

    def copy() -> Mapping[str, float]:
        array = torch.zeros(scale.copy_bytes // 4, device=device)
        us = Repeated(torch, lambda x: x + 1.0, [array] * 2).time(scale)["us"]
        bandwidth[0] = 2 * scale.copy_bytes / us / 1e3
        return {"us": us, "GB/s": bandwidth[0]}

    recorder.run("torch, copy", copy, "measured")

    def operands(batch: int, dtype: str, kind: str) -> tuple[list[Any], Any, Any]:
        legal = masks.legal_tokens(kind, batch, scale.vocabulary)
        words = torch.from_numpy(masks.pack(legal)).to(device)
        logits = torch.randn(batch, scale.vocabulary, device=device, dtype=getattr(torch, dtype))
        turns = measure.calls_for(logits.nbytes, scale)
        return [logits.clone() for _ in range(turns)], words, legal

    def mask(batch: int, dtype: str, kind: str) -> Mapping[str, float]:
        turns, words, legal = operands(batch, dtype, kind)
        timed = Repeated(torch, lambda logits: apply(logits, words), turns).time(scale)
        moved = bitmask.traffic(legal, turns[0].element_size())
        return timed | measure.shares(timed["us"], moved, bandwidth[0])

    def sample(batch: int, mode: str) -> Mapping[str, float]:
        turns, words, _ = operands(batch, "float32", "half")

        def draw(logits: Any) -> Any:
            apply(logits, words)
            if mode == "greedy":
                return torch.argmax(logits, dim=-1)
            # As vLLM draws: an exponential race, which needs no cumulative sum.
            weights = torch.softmax(logits / 0.8, dim=-1)
            return (weights / torch.empty_like(weights).exponential_(1.0)).argmax(dim=-1)

        return Repeated(torch, draw, turns).time(scale)

    for (batch, dtype), kind in itertools.product(bitmask.sizes(scale), masks.KINDS):
        one = functools.partial(mask, batch, dtype, kind)
        recorder.run(names.mask("xgrammar", batch, dtype, kind), one, "measured")
    for batch, mode in itertools.product(scale.batches, ("greedy", "temperature")):
        one = functools.partial(sample, batch, mode)
        recorder.run(names.sample("xgrammar and torch", batch, mode), one, "measured")
