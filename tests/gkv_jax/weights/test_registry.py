"""Registry files, and how a name becomes a model."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from gkv_jax.errors import UserError
from gkv_jax.weights import load_model
from gkv_jax.weights.entries import (
    HuggingFaceSource,
    find_model,
    model_names,
    models_folder,
    read_entry,
)
from gkv_jax.weights.gguf_tokenizer import save_tokenizer
from gkv_jax.weights.random_model import byte_tokenizer

from .conftest import TINY, random_state

GOOD = """
description = "tiny"
license = "MIT"
[huggingface]
repository = "org/tiny"
revision = "main"
"""
RANDOM = """
[random]
seed = 3
num_layers = 1
hidden_size = 8
intermediate_size = 8
num_heads = 2
num_kv_heads = 1
head_dim = 4
max_position_embeddings = 32
"""


def entry_file(folder: Path, text: str) -> Path:
    path = folder / "tiny.toml"
    path.write_text(text)
    return path


def test_a_good_file(tmp_path: Path) -> None:
    entry = read_entry(entry_file(tmp_path, GOOD))
    assert (entry.name, entry.sources) == ("tiny", ("huggingface",))
    assert entry.huggingface == HuggingFaceSource("org/tiny", "main")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (GOOD + "branch = 'main'\n", r"\[huggingface\]: unknown fields branch; known: repository"),
        ("colour = 'blue'\n" + GOOD, "unknown fields colour"),
        ("name = 'x'\n" + GOOD, "unknown field name"),
        (GOOD.replace('license = "MIT"', ""), "missing fields license"),
        (GOOD.replace('revision = "main"', ""), r"\[huggingface\]: missing fields revision"),
        (GOOD.replace('revision = "main"', "revision = 3"), "revision must be str, not 3"),
        (GOOD.replace('description = "tiny"', "description = 3"), "description must be str"),
        (GOOD.split("[", 1)[0], "no source"),
        (GOOD.split("[", 1)[0] + "huggingface = 'org/tiny'\n", "huggingface must be a table"),
        (GOOD.split("[", 1)[0] + "[random]\nseed = 0\n", r"\[random\]: missing fields num_layers"),
        (GOOD + RANDOM, r"\[random\] excludes other sources, but there is huggingface"),
        ("= 3", "tiny.toml"),
    ],
)
def test_a_bad_file(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        read_entry(entry_file(tmp_path, text))


@pytest.mark.parametrize("name", model_names())
def test_every_file_of_the_repository(name: str) -> None:
    entry = find_model(name)
    assert entry.sources or entry.random
    if entry.pypi is not None:
        assert "==" in entry.pypi.requirement
        assert all(len(entry_sum) == 64 for key, entry_sum in asdict(entry.pypi).items()
                   if key.endswith("sha256"))  # fmt: skip


def test_configs_are_found_from_a_checkout() -> None:
    assert (models_folder() / "smollm2-135m-instruct.toml").is_file()


def test_unknown_name_lists_the_known_and_the_other_forms(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="smollm2-135m-instruct") as caught:
        load_model("smollm3")
    for form in ("folder", ".gguf", "organisation/name"):
        assert form in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="known: smollm2-135m-instruct"):
        find_model("nothing")
    with pytest.raises(UserError, match="no model"):
        load_model(tmp_path / "not" / "there")


def test_a_folder_with_a_subfolder_called_params(
    tmp_path: Path, write_folder: Callable[..., Path]
) -> None:
    folder = write_folder(TINY, random_state(TINY))
    save_tokenizer(byte_tokenizer(), folder)
    (folder / "params").mkdir()
    assert load_model(folder, "float32").config == TINY


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config.json"):
        load_model(tmp_path)


def test_unknown_dtype_is_said_before_anything_is_loaded() -> None:
    with pytest.raises(UserError, match="dtype 'int4'"):
        load_model("smollm2-135m-instruct", "int4")
