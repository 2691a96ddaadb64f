"""ModelConfig from config.json: both generations of transformers, and what is refused."""

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest

from gkv_jax.errors import UserError
from gkv_jax.models import families
from gkv_jax.models.config import GGUFHeader, ModelConfig
from gkv_jax.models.fields import Fields
from gkv_jax.models.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from gkv_jax.weights.huggingface import read_model

from .conftest import JUNK, TINY, hf_config

LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def read(**changes: Any) -> ModelConfig:
    return families.from_hf(hf_config(TINY, **changes)).config


def test_reads_every_field() -> None:
    assert read() == TINY
    assert hash(read()) == hash(TINY)


def test_defaults_are_those_of_llama() -> None:
    full = hf_config(TINY)
    needed = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    config = families.from_hf({key: full[key] for key in needed}).config
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert config.rope == RopeConfig(10000.0)
    assert not config.tie_word_embeddings
    assert not config.attention_bias
    assert not config.mlp_bias
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            RopeConfig(5e5, Llama3Scaling(32.0, 1.0, 4.0, 8192)),
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(1e4, LinearScaling(2.0))),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}},
            RopeConfig(1e4, LinearScaling(2.0)),
        ),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
            RopeConfig(1e5),
        ),
        (
            {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
            RopeConfig(5e5, Llama3Scaling(32.0, 1.0, 4.0, 8192)),
        ),
        # As the first YaRN models have it.
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 16.0,
                    "original_max_position_embeddings": 4096,
                    "finetuned": True,
                }
            },
            RopeConfig(1e4, YarnScaling(16.0, 4096, 0.1 * math.log(16) + 1)),
        ),
        # As gpt-oss has it, but for the type of the model.
        (
            {
                "rope_theta": 150000,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 16.0,
                    "beta_slow": 2.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
            },
            RopeConfig(
                150000.0,
                YarnScaling(32.0, 4096, 0.1 * math.log(32) + 1, 16.0, 2.0, truncate=False),
            ),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.5}},
            RopeConfig(1e4, YarnScaling(2.0, TINY.max_position_embeddings, 1.5)),
        ),
        (
            {
                "original_max_position_embeddings": 64,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": None,
                    "original_max_position_embeddings": 9,
                    "attention_factor": 1,
                },
            },
            RopeConfig(1e4, YarnScaling(TINY.max_position_embeddings / 64, 64, 1.0)),
        ),
        ({"partial_rotary_factor": 0.5}, RopeConfig(1e4, None, 0.5)),
        (
            {
                "partial_rotary_factor": 0.25,
                "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
            },
            RopeConfig(1e4, None, 0.5),
        ),
    ],
)
def test_rope_of_transformers_4_and_5(changes: dict[str, Any], rope: RopeConfig) -> None:
    assert read(**changes).rope == rope


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "bert"}, "'bert' is not served; known: llama, mistral, "),
        ({"model_type": None}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"partial_rotary_factor": 0.32}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "low_freq_factor": 1.0}}, "low_freq"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            r"rope_parameters\.rope_type='longrope' .*yarn",
        ),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, not 'yarn'"),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
            "rope_parameters and rope_scaling differ",
        ),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, "factor of the rotary scaling"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, r"low_freq_factor \(1\.0\) must be"),
        ({"rope_theta": 0}, "rope_theta must be above 1"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be at least 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an integer or a list"),
        ({"eos_token_id": [2.0]}, "eos_token_id must be an integer or a list"),
        ({"eos_token_id": [2, 300]}, "eos_token_id 300 is no token"),
        ({"bos_token_id": -1}, "bos_token_id -1 is no token"),
        ({"bos_token_id": True}, "bos_token_id must be an integer, not True"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "'awq' is not served; take the repository",
        ),
        ({"rope_scaling": {**LLAMA3, "attention_factor": 1.2}}, "attention_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 2}}, "partial"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"num_hidden_layers": 0}, "num_layers"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 1e5}, LLAMA3 | {"rope_theta": 5e5}]
)
def test_reads_what_the_installed_transformers_writes(tmp_path: Path, rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=3,
        rope_parameters=rope,
        tie_word_embeddings=True,
        max_position_embeddings=16384,
        eos_token_id=[2, 3],
    ).save_pretrained(tmp_path)
    config = read_model(tmp_path).config
    assert (config.num_layers, config.tie_word_embeddings, config.eos_token_ids) == (
        3,
        True,
        (2, 3),
    )
    assert config.rope.theta == rope["rope_theta"]
    assert (config.rope.scaling is not None) == (rope["rope_type"] == "llama3")


def gguf_metadata(**rope: Any) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.block_count": 1,
        "llama.context_length": 1024,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.vocab_size": 61,
        **{f"llama.rope.scaling.{name}": value for name, value in rope.items()},
    }


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({}, YarnScaling(4.0, 1024, 0.1 * math.log(4) + 1)),
        (
            {
                "original_context_length": 256,
                "attn_factor": 0.5,
                "yarn_beta_fast": 16.0,
                "yarn_beta_slow": 2.0,
            },
            YarnScaling(4.0, 256, 0.5 * (0.1 * math.log(4) + 1), 16.0, 2.0),
        ),
    ],
)
def test_yarn_of_gguf(rope: dict[str, Any], scaling: YarnScaling) -> None:
    metadata = gguf_metadata(type="yarn", factor=4.0, **rope)
    assert families.from_gguf(GGUFHeader(metadata, ["output.weight"])).config.rope == RopeConfig(
        1e4, scaling
    )


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"type": "yarn"}, "llama.rope.scaling.factor is missing"),
        ({"type": "longrope", "factor": 4.0}, "'longrope' is not served"),
        ({"type": "yarn", "factor": 4.0, "yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
    ],
)
def test_what_is_not_served_of_gguf(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        families.from_gguf(GGUFHeader(gguf_metadata(**rope), ["output.weight"]))


def test_every_gguf_field_mistyped_is_an_error_or_harmless() -> None:
    metadata = gguf_metadata(type="yarn", factor=4.0) | {"llama.attention.key_length": 16}
    for key in metadata:
        for value in JUNK:
            with contextlib.suppress(UserError):
                families.from_gguf(GGUFHeader(metadata | {key: value}, ["output.weight"]))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 10**400, True, "1"])
def test_a_number_is_finite(number: Any) -> None:
    with pytest.raises(UserError, match=r"^there: x must be a finite number, not "):
        Fields({"x": number}, "there: ").number("x")


def test_fields_that_nobody_reads_are_refused_together() -> None:
    off = {"some_bias": False, "some_window": None, "torch_dtype": "bfloat16", "top_p": 0.9}
    assert read(**off) == TINY
    with pytest.raises(UserError, match="can be removed") as caught:
        read(residual_multiplier=0.2, layer_norms=["a"] * 99, **off)
    assert "config.json: layer_norms=['a', " in str(caught.value)
    assert "config.json: residual_multiplier=0.2" in str(caught.value)
    assert len(str(caught.value)) < 300
    assert not any(key in str(caught.value) for key in off)


def test_stop_tokens_of_both_configurations_are_joined() -> None:
    model = families.from_hf(
        hf_config(TINY, eos_token_id=7), generation_config={"eos_token_id": [9, 7]}
    )
    assert model.config.eos_token_ids == (7, 9)
