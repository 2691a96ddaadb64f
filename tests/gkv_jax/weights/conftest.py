"""Tiny random checkpoints, written the way that transformers and llama.cpp write them."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gkv_jax.models.config import ModelConfig
from gkv_jax.models.llama import Llama
from gkv_jax.models.rope_config import RopeConfig

State = dict[str, np.ndarray]

TINY = ModelConfig(
    architecture="llama",
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    rope=RopeConfig(10000.0),
    bos_token_id=256,
    eos_token_ids=(257,),
)


@pytest.fixture
def tiny() -> ModelConfig:
    return TINY


@pytest.fixture(
    params=[(True, False), (False, False), (False, True)], ids=["tied", "untied", "biases"]
)
def any_config(request: pytest.FixtureRequest) -> ModelConfig:
    tied, biases = request.param
    return replace(TINY, tie_word_embeddings=tied, attention_bias=biases, mlp_bias=biases)


def random_state(config: ModelConfig, seed: int = 0) -> State:
    """float32 tensors under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    return {
        leaf.huggingface: rng.standard_normal(leaf.shape, dtype=np.float32)
        for leaf in Llama(config).parameters()
    }


def hf_config(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    """A config.json in the style of transformers 4."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        **changes,
    }


def byte_alphabet() -> list[str]:
    """The 256 characters that byte-level BPE spells bytes with, as tokens 0 to 255."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def gguf_tokens(size: int = 300) -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges: bytes, two control tokens, a few merges, unused ones."""
    merges = ["h e", "l l", "he ll", "Ġ Ġ", "1 2"]
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = [*byte_alphabet(), "<|im_start|>", "<|im_end|>", "<think>", *merged]
    types = [1] * 256 + [3, 3, 4] + [1] * len(merged)
    unused = size - len(tokens)
    return tokens + [f"<unused{i}>" for i in range(unused)], types + [5] * unused, merges


JUNK = ("x", [1], ["x"], [[1]], {"a": 1}, {}, [], True, 1.5, math.nan, 0, -1, 1 << 31, 10**400)
"""Of each kind that a damaged file may have where something else belongs."""


def add_field(writer: Any, key: str, value: Any) -> None:
    """A field of a GGUF file, typed as its value is."""
    kinds = {bool: "bool", int: "uint32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def permute_for_llama_cpp(array: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k, spelled out row by row."""
    width = array.shape[0] // heads
    out = np.empty_like(array)
    for head in range(heads):
        for pair in range(width // 2):
            out[head * width + 2 * pair] = array[head * width + pair]
            out[head * width + 2 * pair + 1] = array[head * width + pair + width // 2]
    return out


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., Path]:
    def write(
        config: ModelConfig, state: State, *, shards: int = 1, dtype: Any = np.float32
    ) -> Path:
        from safetensors.numpy import save_file

        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(hf_config(config)))
        stored = {name: array.astype(dtype) for name, array in state.items()}
        if shards == 1:
            save_file(stored, folder / "model.safetensors")
        else:
            weight_map = {}
            for shard in range(shards):
                file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
                names = sorted(stored)[shard::shards]
                save_file({name: stored[name] for name in names}, folder / file)
                weight_map |= dict.fromkeys(names, file)
            index = {"metadata": {}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return write


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    def write(
        config: ModelConfig,
        state: State,
        *,
        quantisation: str = "F32",
        extra: State | None = None,
        pre: str = "smollm",
        add_bos: bool = False,
        settings: Callable[[Any], None] = lambda writer: None,
    ) -> Path:
        from gguf import GGMLQuantizationType, GGUFWriter, quantize

        path = tmp_path / "tiny.gguf"
        writer = GGUFWriter(path, "llama")
        writer.add_block_count(config.num_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_heads)
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_rope_freq_base(config.rope.theta)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        tokens, types, merges = gguf_tokens(config.vocab_size)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(256)
        writer.add_eos_token_id(257)
        writer.add_add_bos_token(add_bos)
        writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
        settings(writer)
        kind = GGMLQuantizationType[quantisation]
        for leaf in Llama(config).parameters():
            array = state[leaf.huggingface]
            if leaf.name in ("q", "q_bias"):
                array = permute_for_llama_cpp(array, config.num_heads)
            if leaf.name in ("k", "k_bias"):
                array = permute_for_llama_cpp(array, config.num_kv_heads)
            # llama.cpp quantises matrices only
            stored = kind if array.ndim == 2 else GGMLQuantizationType.F32
            writer.add_tensor(leaf.gguf, quantize(array, stored), raw_dtype=stored)
        for name, array in (extra or {}).items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
