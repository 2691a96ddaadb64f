"""``python -m benchmarks.kvpress --python VENV/bin/python``: do we keep the tokens that kvpress keeps?

NVIDIA's kvpress (https://github.com/NVIDIA/kvpress), the reference in PyTorch for cache compression,
scores the same queries, keys and values as our cache: random ones, and those of every layer of a real
model on a real text. It runs in an environment of its own: ``python -m venv VENV && VENV/bin/python -m
pip install kvpress==0.5.5 torch==2.13.0``.
"""

import dataclasses
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import typer
from tqdm import tqdm

from benchmarks.common import RESULTS, print_table, write_json
from benchmarks.kvpress.compare import Difference, difference, total
from benchmarks.kvpress.ours import choosable, read, specs
from benchmarks.kvpress.samples import Sample, model_sample, random_sample, rotated
from gkv_jax import UserError
from gkv_jax.evaluate.texts import DEFAULT_TEXT, load_text
from gkv_jax.rope import inverse_frequencies
from gkv_jax.weights import load_model

_SCRIPT = Path(__file__).with_name("peer_scores.py")


def peer(python: Path, sample: Sample, budgets: Sequence[int]) -> dict[str, np.ndarray]:
    """``<policy>/<budget>/scores [L,Hk,N]`` and ``.../kept [L,Hk,budget]`` by kvpress, and ``versions``.

    Raises:
      UserError: the script failed; it says how.
    """
    positions = jnp.arange(sample.k.shape[1])[None]
    keys = np.asarray(rotated(sample.rope, jnp.asarray(sample.k), positions))
    with tempfile.TemporaryDirectory() as folder:
        given, answer = Path(folder) / "given.npz", Path(folder) / "answer.npz"
        np.savez(
            given,
            q=sample.q.swapaxes(1, 2),
            k=keys.swapaxes(1, 2),
            v=sample.v.swapaxes(1, 2),
            inv_freq=inverse_frequencies(sample.rope.config, sample.rope.head_dim),
            budgets=np.asarray(budgets),
        )
        run = subprocess.run(
            [python, _SCRIPT, given, answer], capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise UserError(f"--python {python}: {_SCRIPT.name} failed:\n{run.stderr[-2000:]}")
        with np.load(answer) as arrays:
            return dict(arrays)


def measure(
    sample: Sample, theirs: Mapping[str, np.ndarray], budgets: Sequence[int]
) -> dict[str, dict[int, Difference]]:
    """Differences from ``theirs`` (of ``peer``) by policy and budget, over all layers and KV heads."""
    layers, tokens, kv_heads, _ = sample.k.shape
    found: dict[str, dict[int, Difference]] = {}
    for budget in budgets:
        for name, spec in tqdm(specs(budget).items(), desc=f"{budget} tokens", disable=None):
            their_kept = theirs[f"{name}/{budget}/kept"]
            their_scores = theirs[f"{name}/{budget}/scores"]
            each = []
            for layer in range(layers):
                scores, held = read(sample, layer, spec)
                each += [
                    difference(
                        held[head],
                        set(their_kept[layer, head].tolist()),
                        their_scores[layer, head],
                        None if scores is None else scores[head],
                        choosable(spec, tokens),
                    )
                    for head in range(kv_heads)
                ]
            found.setdefault(name, {})[budget] = total(each)
    return found


def report(
    results: Mapping[str, Mapping[str, Mapping[int, Difference]]],
    circumstances: Mapping[str, Any],
    folder: Path,
) -> None:
    """Print a table per sample; write JSON."""
    columns = [
        "policy", "kept", "KV heads", "differ", "tokens", "widest gap", "scores off by",
        "equal, ties aside",
    ]  # fmt: skip
    for sample, policies in results.items():
        rows = [
            [
                name, str(budget), str(one.heads), str(one.differing), str(one.tokens),
                f"{one.gap:.0e}", "" if name == "window" else f"{one.score:.0e}",
                "yes" if one.equal else "NO",
            ]
            for name, budgets in policies.items()
            for budget, one in budgets.items()
        ]  # fmt: skip
        print_table(f"tokens kept by us and by kvpress: {sample}", columns, rows)
    differences = {
        sample: {
            policy: {str(budget): dataclasses.asdict(one) for budget, one in by_budget.items()}
            for policy, by_budget in policies.items()
        }
        for sample, policies in results.items()
    }
    write_json("kvpress", {**circumstances, "differences": differences}, folder)


def main(
    python: Annotated[Path, typer.Option(help="an interpreter that has kvpress", exists=True)],
    model: Annotated[str, typer.Option(help="name, folder, GGUF file or hub id")] = (
        "smollm2-135m-instruct"
    ),
    text: Annotated[str, typer.Option(help="a file, or a name in configs/texts")] = DEFAULT_TEXT,
    tokens: Annotated[
        int, typer.Option(help="tokens of the prompt; a power of two", min=256)
    ] = 1024,
    budget: Annotated[
        list[int] | None, typer.Option(help="tokens to keep; may be repeated")
    ] = None,
    folder: Annotated[Path, typer.Option(help="where the JSON goes")] = RESULTS,
) -> None:
    """Compare the tokens that our policies keep with those that kvpress keeps."""
    budgets = budget or [tokens // 8, tokens // 4, tokens // 2]
    if not all(64 < each < tokens for each in budgets):
        raise typer.BadParameter(
            "--budget must be above 64, SnapKV's window there, and below --tokens"
        )
    try:
        loaded = load_model(model, dtype="float32")
        ids = loaded.tokenizer.encode(load_text(text), verbose=False)[:tokens]
    except UserError as error:
        raise typer.BadParameter(str(error)) from error
    if tokens & (tokens - 1) or len(ids) < tokens:
        raise typer.BadParameter("--tokens must be a power of two, and at most those of the text")
    decoder = loaded.model
    samples = {
        "random": random_sample(tokens),
        model: model_sample(decoder, loaded.params, ids),
    }
    results, versions = {}, []
    for name, sample in samples.items():
        try:
            theirs = peer(python, sample, budgets)
        except UserError as error:
            raise typer.BadParameter(str(error)) from error
        results[name] = measure(sample, theirs, budgets)
        versions = theirs["versions"].tolist()
    report(results, {"text": text, "tokens": tokens, "peer": versions}, folder)


if __name__ == "__main__":
    typer.run(main)
