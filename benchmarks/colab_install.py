"""What `pip install gkv_jax` downloads on Colab: packages and bytes; the exit code says if any replaces one.

`make test-colab` makes an environment with Colab's versions (constraints-colab.txt). This asks pip what it
would install into that environment, were the packages absent that Colab does not have. Nothing is
installed: pip sees an environment of the packages' descriptions alone.

    python -m benchmarks.colab_install --environment .venv/colab
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parent.parent
ABSENT = {
    "gkv_jax",
    "xgrammar",
    "apache_tvm_ffi",
    "llguidance",
    "outlines_core",
    "jsonschema_rs",
    "gguf",
}
"""Of our dependencies, and theirs, what a Colab runtime does not have."""


def pip(python: Path, *arguments: str, into: Path | None = None) -> str:
    """Run an environment's pip, for another one's sake if `into` names it; what it printed."""
    command = [str(python), "-m", "pip", *(["--python", str(into)] if into else []), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def describe(environment: Path, folder: Path) -> Path:
    """A virtual environment in `folder` with the descriptions of Colab's packages; its Python."""
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for found in environment.glob("lib/python*/site-packages/*.dist-info"):
        if found.name.split("-")[0] not in ABSENT:
            (site / found.name).symlink_to(found)
    return folder / "bin" / "python"


def resolve(environment: Path, requirement: str) -> list[dict[str, Any]]:
    """What pip would install: name, version, the version it replaces or None, bytes to download."""
    python = environment / "bin" / "python"
    installed = {
        entry["name"].lower().replace("-", "_"): entry["version"]
        for entry in json.loads(pip(python, "list", "--format", "json"))
    }
    with tempfile.TemporaryDirectory() as scratch:
        bare = describe(environment, Path(scratch) / "venv")
        quiet = ("--quiet", "--disable-pip-version-check")
        report = json.loads(
            pip(python, "install", *quiet, "--dry-run", "--report", "-", requirement, into=bare)
        )
        rows = []
        for item in report["install"]:
            name, version = item["metadata"]["name"], item["metadata"]["version"]
            key = name.lower().replace("-", "_")
            size = None
            if not item["is_direct"]:  # our own package is a folder here
                wheels = Path(scratch) / key
                pip(
                    python, "download", *quiet, "--no-deps", "-d", str(wheels), f"{name}=={version}"
                )
                size = sum(wheel.stat().st_size for wheel in wheels.iterdir())
            replaces = None if key in ABSENT else installed.get(key)
            rows.append({"name": name, "version": version, "replaces": replaces, "bytes": size})
    return rows


def main(
    environment: Annotated[Path, typer.Option(help="Made by `make test-colab`.")] = Path(
        ".venv/colab"
    ),
    requirement: Annotated[str, typer.Option(help="What is installed.")] = str(ROOT),
) -> None:
    """Print what pip would install; exit with 1 if Colab would get more than it lacks."""
    if not (environment / "bin" / "python").exists():
        raise typer.BadParameter(f"{environment} is no environment; make it with `make test-colab`")
    rows = resolve(environment.absolute(), requirement)
    for row in rows:
        size = "-" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f} MB"
        note = f"replaces {row['replaces']}" if row["replaces"] else ""
        print(f"{row['name']:<16} {row['version']:<14} {size:>8}  {note}".rstrip())
    print(f"{sum(row['bytes'] or 0 for row in rows) / 1e6:.1f} MB")
    beyond = [row["name"] for row in rows if row["name"].lower().replace("-", "_") not in ABSENT]
    if beyond:
        sys.exit(f"error: Colab would get more than it lacks: {', '.join(beyond)}")


if __name__ == "__main__":
    typer.run(main)
