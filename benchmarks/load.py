"""How long a model takes to load, and what host memory that takes, by the format of its weights.

    python -m benchmarks.load

One model as a GGUF file, as safetensors (bfloat16, as most are published) and as Orbax folders of
``python -m gkv_jax.weights.convert``, each loaded in a fresh process, in turns. Imports are not in the
seconds, the tokenizer is. On CPUs the model itself is host memory; what is beyond it is given in sizes of
the largest tensor.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
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
from gkv_jax import UserError
from gkv_jax.weights import load_model, to_hf_state_dict
from gkv_jax.weights.convert import convert_model

LEAST_RATIO = 3.0
MOST_MEMORY = 1.3
"""Sizes of the largest tensor that loading safetensors may take beside the model."""

Figures = dict[str, Any]


def load_once(name: str, dtype: str) -> Figures:
    """Load in this process. Bytes are None where the system does not tell them."""
    import gguf  # noqa: F401
    import orbax.checkpoint  # noqa: F401
    import safetensors.numpy  # noqa: F401
    from transformers import AutoTokenizer  # noqa: F401

    load_model("tiny-random", dtype)  # whatever else is imported on the way; the backend is there
    before = _reset_peak()
    start, start_cpu = time.perf_counter(), time.process_time()
    loaded = load_model(name, dtype)
    leaves = jax.block_until_ready(jax.tree.leaves(loaded.params))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    peak = _status("VmHWM")
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "host_bytes": None if before is None or peak is None else peak - before,
        "model_bytes": sum(leaf.nbytes for leaf in leaves),
        "largest_bytes": max(leaf.nbytes for leaf in leaves),
    }


def _reset_peak() -> int | None:
    """The resident bytes now, from which on the kernel looks for their peak."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    return _status("VmRSS")


def _status(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(values[0]) * 1024 if values else None


def write_safetensors(name: str, folder: Path) -> None:
    """A model as a Hugging Face folder in bfloat16, tied head left out."""
    from safetensors.numpy import save_file

    from gkv_jax.weights.gguf_tokenizer import save_tokenizer
    from gkv_jax.weights.published import of_model

    loaded = load_model(name, "bfloat16")
    folder.mkdir()
    for file, text in of_model(loaded.model).items():
        (folder / file).write_text(text, encoding="utf-8")
    state = to_hf_state_dict(loaded.model, loaded.params)
    if loaded.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file({key: np.ascontiguousarray(value) for key, value in state.items()},
              folder / "model.safetensors")  # fmt: skip
    save_tokenizer(loaded.tokenizer, folder)


def prepare(name: str, folder: Path, dtype: str) -> dict[str, str]:
    """What is to be loaded, by the name of its format."""
    write_safetensors(name, folder / "safetensors")
    convert_model(name, folder / "orbax", dtype=dtype)
    convert_model(name, folder / "orbax-bfloat16", dtype="bfloat16")
    convert_model(name, folder / "orbax-int8", dtype=dtype, quantize="int8")
    return {
        "GGUF": name,
        "safetensors": str(folder / "safetensors"),
        f"Orbax {dtype}": str(folder / "orbax"),
        "Orbax bfloat16": str(folder / "orbax-bfloat16"),
        "Orbax int8": str(folder / "orbax-int8"),
    }


def measure(paths: Mapping[str, str], dtype: str, repetitions: int) -> dict[str, Figures]:
    """Medians of seconds, and the largest peak, each load in a process of its own."""
    figures: dict[str, list[Figures]] = {kind: [] for kind in paths}

    def one(kind: str) -> float:
        command = [sys.executable, "-m", "benchmarks.load", "--once", paths[kind], "--dtype", dtype]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        figures[kind].append(json.loads(run.stdout.splitlines()[-1]))
        return float(figures[kind][-1]["seconds"])

    seconds = medians(
        interleaved({kind: lambda kind=kind: one(kind) for kind in paths}, repetitions)  # type: ignore[misc]
    )
    return {
        kind: each[0]
        | {
            "seconds": seconds[kind],
            "cpu_seconds": statistics.median(figure["cpu_seconds"] for figure in each),
            "host_bytes": None
            if each[0]["host_bytes"] is None
            else max(figure["host_bytes"] for figure in each),
        }
        for kind, each in figures.items()
    }


def report(figures: Mapping[str, Figures], dtype: str) -> None:
    """Print the table, and the two figures that have targets."""
    rows = []
    for kind, each in figures.items():
        beyond = _beyond(each)
        rows.append(
            [
                kind,
                f"{each['seconds']:.2f}",
                f"{each['cpu_seconds']:.2f}",
                f"{figures['GGUF']['seconds'] / each['seconds']:.2f}",
                f"{each['model_bytes'] / 1e6:.0f}",
                "?" if beyond is None else f"{each['host_bytes'] / 1e6:.0f}",
                "?" if beyond is None else f"{beyond:.2f}",
            ]
        )
    columns = [
        "weights",
        "seconds",
        "of CPU",
        "GGUF / this",
        "model MB",
        "peak MB",
        "beyond / largest tensor",
    ]
    print_table("loading a model", columns, rows)
    exact = f"Orbax {dtype}"
    print_verdict(
        f"seconds, GGUF / {exact}",
        figures["GGUF"]["seconds"] / figures[exact]["seconds"],
        least=LEAST_RATIO,
    )
    beyond = _beyond(figures["safetensors"])
    if beyond is not None:
        print_verdict(
            "host memory beside the model, in largest tensors, safetensors",
            beyond,
            most=MOST_MEMORY,
        )


def _beyond(figures: Figures) -> float | None:
    """Peak host memory beyond the model (where the model is host memory), in largest tensors."""
    if figures["host_bytes"] is None:
        return None
    model = figures["model_bytes"] if jax.default_backend() == "cpu" else 0
    return float((figures["host_bytes"] - model) / figures["largest_bytes"])


def main(
    model: Annotated[str, typer.Option(help="registry name or file of a GGUF model")] = (
        "smollm2-135m-instruct"
    ),
    dtype: Annotated[str, typer.Option(help="that the models are loaded in")] = "float32",
    repetitions: Annotated[int, typer.Option(help="timed rounds", min=1)] = 3,
    folder: Annotated[Path, typer.Option(help="where JSON goes")] = RESULTS,
    once: Annotated[str | None, typer.Option(help="load this here, and print JSON")] = None,
) -> None:
    """Load a model from every format and compare."""
    try:
        if once is not None:
            print(json.dumps(load_once(once, dtype)))
            return
        warn_if_busy()
        with tempfile.TemporaryDirectory(prefix="gkv-load-") as scratch:
            paths = prepare(model, Path(scratch), dtype)
            figures = measure(paths, dtype, repetitions)
    except UserError as error:
        raise typer.BadParameter(str(error)) from error
    report(figures, dtype)
    write_json("load", {"model": model, "dtype": dtype, "figures": figures}, folder)


if __name__ == "__main__":
    typer.run(main)
