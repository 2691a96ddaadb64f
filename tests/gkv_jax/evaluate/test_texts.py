"""Texts are joined into paragraphs, and only the right file is believed."""

import hashlib
import tomllib
from pathlib import Path

import pytest

from gkv_jax import UserError
from gkv_jax.evaluate import texts


def test_page_margins_do_not_end_a_paragraph() -> None:
    page = "One line\nand the next\n\n## END ##\n\np.7:0\n\nof it. Over.\n\nAnother\none."
    assert texts.paragraphs(page, r"^(#.*|p\.\d+:\d+)$") == (
        "One line and the next of it. Over.\nAnother one."
    )


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("a\nb")
    assert texts.load_text(str(path)) == "a\nb"


def test_unknown_text_lists_the_known() -> None:
    with pytest.raises(UserError, match=texts.DEFAULT_TEXT):
        texts.load_text("no-such-text")


def test_a_damaged_text_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = b"Good text."
    source = tomllib.loads((texts._FOLDER / f"{texts.DEFAULT_TEXT}.toml").read_text())["pypi"]
    source["member_sha256"] = hashlib.sha256(good).hexdigest()
    entry = "\n".join(f"{name} = '''{value}'''" for name, value in source.items())
    (tmp_path / "some.toml").write_text(f"[pypi]\n{entry}\n")
    monkeypatch.setattr(texts, "_FOLDER", tmp_path)
    monkeypatch.setenv("GKV_JAX_CACHE", str(tmp_path))
    fetches: list[str] = []

    def fetch(source: dict[str, str], scratch: Path) -> bytes:
        fetches.append(source["requirement"])
        return good

    monkeypatch.setattr(texts, "_fetch", fetch)
    assert texts.load_text("some") == texts.load_text("some") == "Good text."
    assert len(fetches) == 1
    (tmp_path / "texts" / "some.txt").write_bytes(b"Bad")
    assert texts.load_text("some") == "Good text."
    assert len(fetches) == 2
