"""Downloads that break, resume, and are refused."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gkv_jax.weights import download as module
from gkv_jax.weights.download import DownloadError, download, download_wheel, wheel_url

from .index_server import PROJECT, IndexServer, build_wheel, index_server

WHEEL = build_wheel(bytes(range(256)) * 4000)
SHA256 = hashlib.sha256(WHEEL).hexdigest()
SIZE = len(WHEEL)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexServer]:
    monkeypatch.setattr(module, "_BACKOFF_S", 0.0)
    # pip as a user has it who configured this index and nothing else
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with index_server(WHEEL) as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.address}/simple")
        yield server


def partial_of(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def test_whole(server: IndexServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "wheel"
    download(server.url, SHA256, SIZE, target)
    assert target.read_bytes() == WHEEL
    assert list(tmp_path.iterdir()) == [target]
    assert "100%" in capsys.readouterr().err


def test_broken_connections_are_resumed(server: IndexServer, tmp_path: Path) -> None:
    server.cuts = 2
    target = tmp_path / "wheel"
    download(server.url, SHA256, SIZE, target)
    assert target.read_bytes() == WHEEL
    first, *resumed = server.requests
    assert first is None
    sent = (SIZE // 2, SIZE // 2 + SIZE // 4)
    for wanted, at_most in zip(resumed, sent, strict=True):
        start = int((wanted or "").removeprefix("bytes=").rstrip("-"))
        assert at_most - 2 * module._CHUNK < start <= at_most


def test_given_up_and_resumed_by_the_next_call(server: IndexServer, tmp_path: Path) -> None:
    server.cuts = 4
    target = tmp_path / "wheel"
    with pytest.raises(DownloadError, match="again to resume"):
        download(server.url, SHA256, SIZE, target)
    assert not target.exists()
    kept = partial_of(target).stat().st_size
    assert SIZE // 2 < kept < SIZE
    assert server.requests[-1] != f"bytes={kept}-"
    download(server.url, SHA256, SIZE, target)
    assert target.read_bytes() == WHEEL
    assert server.requests[-1] == f"bytes={kept}-"


def test_server_that_ignores_ranges(server: IndexServer, tmp_path: Path) -> None:
    server.cuts, server.ranges = 1, False
    target = tmp_path / "wheel"
    download(server.url, SHA256, SIZE, target)
    assert target.read_bytes() == WHEEL


def test_wrong_hash_is_refused_and_thrown_away(server: IndexServer, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=f"has SHA-256 {SHA256}, not 0{{64}}") as caught:
        download_wheel(f"{PROJECT}==1.0", "0" * 64, SIZE, tmp_path / "wheel")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert len(server.requests) == 1  # pip would fetch the same file


def test_foreign_beginning_is_replaced(server: IndexServer, tmp_path: Path) -> None:
    target = tmp_path / "wheel"
    partial_of(target).write_bytes(b"another file")
    download(server.url, SHA256, SIZE, target)
    assert target.read_bytes() == WHEEL
    assert server.requests == ["bytes=12-", None]


def test_address_comes_from_the_configured_index(server: IndexServer) -> None:
    assert wheel_url(f"{PROJECT}==1.0") == server.url
    assert server.requests == []  # the metadata suffice
    with pytest.raises(DownloadError, match="pip install failed") as caught:
        wheel_url(f"{PROJECT}==2.0")
    assert "\n" not in str(caught.value)


def test_wheel(server: IndexServer, tmp_path: Path) -> None:
    server.cuts = 1
    target = tmp_path / "wheel"
    download_wheel(f"{PROJECT}==1.0", SHA256, SIZE, target)
    assert target.read_bytes() == WHEEL


def test_pip_downloads_what_requests_cannot(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index on disk has file addresses."""
    links = tmp_path / "links"
    links.mkdir()
    (links / server.url.rsplit("/", 1)[1]).write_bytes(WHEEL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    target = tmp_path / "wheel"
    download_wheel(f"{PROJECT}==1.0", SHA256, SIZE, target)
    assert target.read_bytes() == WHEEL
    assert server.requests == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["links", "wheel"]


def test_certificates_follow_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    bundle = tmp_path / "bundle.pem"
    bundle.touch()
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\ncert = {bundle}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    assert module._certificates() == str(bundle)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert module._certificates() is True
    monkeypatch.setenv("PIP_CERT", str(bundle))
    assert module._certificates() == str(bundle)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(bundle))
    assert module._certificates() is True  # requests reads that one itself
