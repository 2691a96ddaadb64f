"""``python -m gkv_jax.weights.convert NAME OUT``: a model as it is computed with, kept by Orbax."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gkv_jax.errors import UserError


def convert(
    name: Annotated[
        str, typer.Argument(help="a model of configs/models, a folder, a .gguf file, or a hub id")
    ],
    out: Annotated[Path, typer.Argument(help="a new folder, which then stands for the model")],
    dtype: Annotated[
        str, typer.Option(help="of the weights: float32, bfloat16 or float16")
    ] = "bfloat16",
    quantize: Annotated[
        str | None, typer.Option(help="int8: round the linear weights and the head")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace a model that OUT holds")
    ] = False,
) -> None:
    """Convert a model's weights to the layout that this library computes with, kept by Orbax.

    Example: python -m gkv_jax.weights.convert smollm2-135m-instruct smollm2 --dtype float32
    """
    try:
        size = convert_model(name, out, dtype=dtype, quantize=quantize, overwrite=overwrite)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(f"{name}: {size / 1e6:.1f} MB of {quantize or dtype} weights in {out}")


def convert_model(
    name: str | Path,
    out: Path,
    *,
    dtype: str = "bfloat16",
    quantize: str | None = None,
    overwrite: bool = False,
) -> int:
    """Load a model and write it to ``out``; returns the bytes of its parameters.

    Raises UserError for what ``load_model`` and ``orbax.save`` refuse, for a ``quantize`` other than
    "int8" and None, and for an ``out`` that ``load_model`` would take for a model of the registry.
    """
    import jax

    from gkv_jax.weights import orbax
    from gkv_jax.weights.entries import model_names
    from gkv_jax.weights.parameters import quantize_in_turn
    from gkv_jax.weights.registry import load_model

    if quantize not in (None, "int8"):
        raise UserError(f"quantize is {quantize!r}; choose int8, or leave it out")
    if str(out) in model_names():
        raise UserError(f"{out} is the name of a model of the registry; choose another folder")
    orbax.import_orbax()  # before minutes of loading
    loaded = load_model(name, dtype)
    params = loaded.params
    if quantize == "int8" and not orbax.is_quantized(params):
        params = quantize_in_turn(loaded.model, params)
    orbax.save(
        out, loaded.model, params, loaded.tokenizer, published=loaded.published, overwrite=overwrite
    )
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


if __name__ == "__main__":
    typer.run(convert)
