"""Folders with safetensors: single and sharded, whole and damaged."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from gkv_jax.errors import UserError
from gkv_jax.models.config import ModelConfig
from gkv_jax.weights import fill_params, huggingface, load_model, to_hf_state_dict
from gkv_jax.weights.huggingface import SafetensorsCheckpoint, read_model, read_tokenizer
from gkv_jax.weights.parameters import placer

from .conftest import TINY, gguf_tokens, random_state


def load(folder: Path) -> dict[str, np.ndarray]:
    model = read_model(folder)
    tensors = SafetensorsCheckpoint.open(folder)
    params = fill_params(model, tensors, "huggingface", placer("float32"))
    return to_hf_state_dict(model, params)


@pytest.mark.parametrize("shards", [1, 3])
def test_equals_the_source(
    any_config: ModelConfig, write_folder: Callable[..., Path], shards: int
) -> None:
    state = random_state(any_config)
    folder = write_folder(any_config, state, shards=shards)
    assert read_model(folder).config == any_config
    loaded = load(folder)
    for name, array in state.items():
        np.testing.assert_array_equal(loaded[name], array)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_is_read_exactly(write_folder: Callable[..., Path], dtype: type) -> None:
    state = random_state(TINY)
    loaded = load(write_folder(TINY, state, dtype=dtype))
    for name, array in state.items():
        np.testing.assert_array_equal(loaded[name], array.astype(dtype).astype(np.float32))


def test_quantised_tensors_are_refused(write_folder: Callable[..., Path]) -> None:
    folder = write_folder(TINY, random_state(TINY), dtype=np.int8)
    with pytest.raises(UserError, match="stored as I8"):
        load(folder)


def test_truncated_file(write_folder: Callable[..., Path]) -> None:
    file = write_folder(TINY, random_state(TINY)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="truncated or damaged") as caught:
        load(file.parent)
    assert "\n" not in str(caught.value)


def test_lost_shard(write_folder: Callable[..., Path]) -> None:
    folder = write_folder(TINY, random_state(TINY), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no model-00002-of-00002.safetensors"):
        load(folder)


def test_index_that_does_not_fit_its_shards(write_folder: Callable[..., Path]) -> None:
    folder = write_folder(TINY, random_state(TINY), shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"disagree about: model.norm.weight"):
        load(folder)


def test_no_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"expected model.safetensors"):
        SafetensorsCheckpoint.open(tmp_path)


def test_config_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config.json"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_model(tmp_path)


def write_tokenizer(folder: Path, tokenizer_class: str) -> None:
    from gkv_jax.weights.gguf_tokenizer import save_tokenizer, tokenizer_from_metadata

    tokens, types, merges = gguf_tokens()
    fields = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": types}
    fields |= {"merges": merges, "bos_token_id": 256, "eos_token_id": 257}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    save_tokenizer(tokenizer_from_metadata(metadata), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": tokenizer_class}))


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_tokenizer_json_is_followed_whatever_class_is_named(
    write_folder: Callable[..., Path], name: str
) -> None:
    folder = write_folder(TINY, random_state(TINY))
    write_tokenizer(folder, name)
    model = load_model(folder, "float32")
    # Two spaces before a digit are one token only if digits are split off first.
    assert model.tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert model.tokenizer.eos_token_id == 257


def test_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="tokenizer cannot be read"):
        read_tokenizer(tmp_path)


def test_hub_id(write_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(TINY, random_state(TINY))
    write_tokenizer(folder, "PreTrainedTokenizerFast")
    asked = []

    def snapshot(repository: str, **options: object) -> str:
        asked.append(repository)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert load_model("some-org/some-model", "float32").config == TINY
    assert asked == ["some-org/some-model"]


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repository: str, **options: object) -> str:
        raise ConnectionError("no route to host\nand a long explanation")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(UserError, match=r"some-org/some-model.*no route.*local folder") as caught:
        huggingface.download_repository("some-org/some-model")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model(write_folder: Callable[..., Path]) -> None:
    smaller = replace(TINY, vocab_size=262)
    folder = write_folder(smaller, random_state(smaller))
    write_tokenizer(folder, "PreTrainedTokenizerFast")
    with pytest.raises(UserError, match=r"tokens go up to 299, but .* \(vocab_size\) has 262"):
        load_model(folder, "float32")


def test_added_tokens_may_lie_beyond(write_folder: Callable[..., Path]) -> None:
    folder = write_folder(TINY, random_state(TINY))
    write_tokenizer(folder, "PreTrainedTokenizerFast")
    tokenizer = read_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    loaded = load_model(folder, "float32")
    assert loaded.tokenizer.get_vocab()["<image>"] == 300 == loaded.config.vocab_size


def test_published_texts(write_folder: Callable[..., Path]) -> None:
    folder = write_folder(TINY, random_state(TINY))
    (folder / "generation_config.json").write_text('{"eos_token_id": [7]}')
    write_tokenizer(folder, "PreTrainedTokenizerFast")
    loaded = load_model(folder, "float32")
    assert loaded.config.eos_token_ids == (257, 7)
    for name in ("config.json", "generation_config.json"):
        assert loaded.published[name] == (folder / name).read_text()
