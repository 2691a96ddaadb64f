"""Gemma 2 and 3: published configurations, GGUF files, and the soft cap of the logits.

That their logits equal transformers' is in ``test_families``.
"""

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax import UserError
from gkv_jax.models import families
from gkv_jax.models.gemma import Gemma, GemmaConfig
from gkv_jax.models.rope_config import LinearScaling, RopeConfig
from gkv_jax.step import StepInputs, choose
from gkv_jax.weights.gguf import GGUFCheckpoint
from gkv_jax.weights.parameters import fill_params, placer, to_hf_state_dict
from pallas_kernels.int8_matmul import Int8Matrix
from pallas_kernels.masked_head import SoftCapped
from pallas_kernels.masked_sample import Rows
from pallas_kernels.masked_sample import xla as sampler

# --- config.json --------------------------------------------------------------------------------

GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.4",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
GEMMA3_270M = {
    **{k: v for k, v in GEMMA3_1B.items() if k != "sliding_window_pattern"},
    "_sliding_window_pattern": 6,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "layer_types": [
        "full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(18)
    ],
    "num_hidden_layers": 18,
    "use_bidirectional_attention": False,
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
LOCAL_ROPE = RopeConfig(10_000.0)


def read(config: dict[str, Any], generation: dict[str, Any] | None = None) -> GemmaConfig:
    model = families.from_hf(config, generation)
    assert isinstance(model, Gemma)
    return model.config


def test_gemma_2_2b() -> None:
    config = read(GEMMA2_2B)
    assert config.windows == (4096, None) * 13
    assert (config.attention_cap, config.final_cap) == (50.0, 30.0)
    assert (config.rope, config.local_rope, config.qk_norm) == (LOCAL_ROPE, None, False)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (1, 107)
    ropes = {layer.rope for layer in Gemma(config).layers}
    assert len(ropes) == 1


@pytest.mark.parametrize(
    ("published", "layers"), [(GEMMA3_1B, 26), (GEMMA3_270M, 18)], ids=["1b", "270m"]
)
def test_gemma_3(published: dict[str, Any], layers: int) -> None:
    config = read(published, {"eos_token_id": [1, 106]})
    assert config.windows == tuple(None if at % 6 == 5 else 512 for at in range(layers))
    assert (config.attention_cap, config.final_cap, config.qk_norm) == (None, None, True)
    assert config.eos_token_ids == (1, 106)
    for layer in Gemma(config).layers:
        assert layer.rope.config.theta == (1e6 if layer.window is None else 1e4)


def test_gemma_3_4b_is_served_without_its_images(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = read(GEMMA3_4B)
    assert "only its text is served" in caplog.text
    assert config.windows == tuple(None if at % 6 == 5 else 1024 for at in range(34))
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262_208, 8, 4)
    assert (config.head_dim, config.max_position_embeddings) == (256, 131_072)
    assert config.rope == RopeConfig(1e6, LinearScaling(8.0))
    assert config.local_rope == LOCAL_ROPE
    assert config.eos_token_ids == (1, 106)


def test_derivatives_of_gemma_2_9b() -> None:
    """Which name the window twice."""
    nine = GEMMA2_2B | {
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_attention_heads": 16,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
        "sliding_window_size": 4096,
    }
    assert read(nine).windows == (4096, None) * 21


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [(None, None, True), (False, None, False), (None, False, False), (False, True, False)],
)
def test_an_untied_gemma_3(outer: bool | None, inner: bool | None, tied: bool) -> None:
    text = GEMMA3_4B["text_config"] | {"tie_word_embeddings": inner}  # type: ignore[operator]
    config = read(GEMMA3_4B | {"tie_word_embeddings": outer, "text_config": text})
    assert config.tie_word_embeddings is tied


def test_what_a_file_leaves_out() -> None:
    """A null cap is no cap; an absent one is the default."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        without = {k: v for k, v in GEMMA2_2B.items() if k != key}
        assert read(without) == read(GEMMA2_2B)
    config = read({**GEMMA2_2B, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (config.attention_cap, config.final_cap) == (None, None)
    without = {k: v for k, v in GEMMA3_1B.items() if "rope" not in k and "pattern" not in k}
    assert read(without) == read(GEMMA3_1B)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GEMMA3_1B, "use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({**GEMMA3_1B, "attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0"),
        ({**GEMMA3_1B, "hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ({**GEMMA3_1B, "sliding_window": None}, "sliding_window is null"),
        ({**GEMMA3_1B, "sliding_window": "512"}, "sliding_window must be an integer"),
        ({**GEMMA3_1B, "sliding_window_pattern": 0}, "sliding_window_pattern must be at least 1"),
        (
            {**GEMMA3_1B, "rope_parameters": {"rope_theta": 1e6}},
            r"rope_parameters\.rope_theta=1000000\.0: not served",
        ),
        ({**GEMMA3_1B, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0"),
        ({**GEMMA2_2B, "final_logit_softcapping": -30.0}, "final_cap must be above 0"),
        ({**GEMMA2_2B, "layer_types": ["sliding_attention"]}, "layer_types are 1"),
        ({**GEMMA3_4B, "text_config": None}, "text_config is missing"),
        ({**GEMMA2_2B, "sliding_window_size": 512}, "sliding_window_size=512"),
        ({**GEMMA2_2B, "architectures": ["Gemma3ForCausalLM"]}, "for model_type 'gemma2'"),
        ({**GEMMA3_4B, "text_config": {"model_type": "llama"}}, "text_config.model_type='llama'"),
        ({**GEMMA3_4B, "quantization_config": {"quant_method": "gptq"}}, "take the repository"),
        (
            {**GEMMA3_4B, "text_config": {**GEMMA3_4B["text_config"], "experts": 8}},  # type: ignore[dict-item]
            r"text_config\.experts=8",
        ),
    ],
)
def test_what_is_not_served_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(config)


# --- Weights ------------------------------------------------------------------------------------

TINY3 = GemmaConfig(
    architecture="gemma3",
    vocab_size=290,
    hidden_size=32,
    intermediate_size=48,
    num_layers=7,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    rope=RopeConfig(1e6, LinearScaling(8.0)),
    bos_token_id=2,
    eos_token_ids=(1, 106),
    windows=(8,) * 5 + (None, 8),
    query_pre_attn_scalar=16.0,
    local_rope=LOCAL_ROPE,
    qk_norm=True,
)
TINY2 = dataclasses.replace(
    TINY3,
    architecture="gemma2",
    num_layers=2,
    rope=LOCAL_ROPE,
    windows=(8, None),
    local_rope=None,
    qk_norm=False,
    attention_cap=50.0,
    final_cap=2.0,
)


def random_state(config: GemmaConfig) -> dict[str, np.ndarray]:
    """float32 tensors under their Hugging Face names."""
    rng = np.random.default_rng(0)
    return {
        leaf.huggingface: rng.normal(0, 0.3, leaf.shape).astype(np.float32)
        for leaf in Gemma(config).parameters()
    }


def write_gguf(path: Path, config: GemmaConfig, state: dict[str, np.ndarray], **extra: Any) -> None:
    """As llama.cpp's converter does, tensors named by the gguf package."""
    writer = gguf.GGUFWriter(path, config.architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(8)
    if config.architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attention_cap)
        writer.add_final_logit_softcapping(config.final_cap)
    else:
        writer.add_rope_freq_base(config.rope.theta)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(106)
    for key, value in extra.items():
        writer.add_uint32(key, value)
    architectures = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[config.architecture], config.num_layers)
    for name, array in state.items():
        theirs = names.get_name(name.removesuffix(".weight")) + ".weight"
        writer.add_tensor(theirs, array + 1 if "norm" in name else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tiny", [TINY2, TINY3], ids=["gemma2", "gemma3"])
def test_a_gguf_file_equals_its_source(tmp_path: Path, tiny: GemmaConfig) -> None:
    state = random_state(tiny)
    write_gguf(tmp_path / "tiny.gguf", tiny, state)
    checkpoint = GGUFCheckpoint.open(tmp_path / "tiny.gguf")
    model = checkpoint.model
    assert model == Gemma(tiny)
    params = fill_params(model, checkpoint, "gguf", placer("float32"))
    loaded = to_hf_state_dict(model, params)
    for name, array in state.items():
        np.testing.assert_allclose(loaded[name], array, rtol=0, atol=2e-7)  # (1 + w) - 1


def test_gguf_files_of_27b_scale_attention_otherwise(tmp_path: Path) -> None:
    """By hidden size over heads; llama.cpp knows them by their number of layers."""
    for tiny, layers in ((TINY2, 46), (TINY3, 62)):
        large = dataclasses.replace(tiny, num_layers=layers, windows=())
        path = tmp_path / f"{layers}.gguf"
        write_gguf(path, large, {})
        assert GGUFCheckpoint.open(path).model.config.query_pre_attn_scalar == 32 / 4


def test_gguf_keys_that_are_not_served(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", TINY3, {}, **{"gemma3.expert_count": 8})
    with pytest.raises(UserError, match=r"GGUF: gemma3\.expert_count=8"):
        _ = GGUFCheckpoint.open(tmp_path / "tiny.gguf").model


def test_the_language_model_inside_a_larger_one() -> None:
    """Of published files (language_model.model.), and as transformers 5 has it in memory."""
    state = random_state(TINY3)
    expected = fill_params(Gemma(TINY3), state, "huggingface", placer("float32"))
    others = {"vision_tower.x.weight": np.ones(3), "multi_modal_projector.y": np.ones(3)}
    published = {f"language_model.{name}": array for name, array in state.items()}
    in_memory = {name.replace("model.", "model.language_model."): a for name, a in state.items()}
    for tensors in (
        published | others | {"language_model.lm_head.weight": expected["embed"]},
        in_memory | {f"model.{name}": array for name, array in others.items()},
    ):
        loaded = fill_params(Gemma(TINY3), tensors, "huggingface", placer("float32"))
        jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    text = Gemma(dataclasses.replace(TINY3, architecture="gemma3_text"))
    with pytest.raises(UserError, match=r"unexpected: vision_tower\.x\.weight"):
        fill_params(text, state | {"vision_tower.x.weight": others["vision_tower.x.weight"]},
                    "huggingface", placer("float32"))  # fmt: skip


# --- The soft cap -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def capped() -> tuple[Gemma, Any]:
    """A Gemma 2 whose logits would be dozens but for their cap of 2."""
    state = random_state(TINY2)
    state["model.embed_tokens.weight"] *= 10
    model = Gemma(TINY2)
    return model, fill_params(model, state, "huggingface", placer("float32"))


@pytest.mark.parametrize("head", ["masked", "full"])
def test_the_cap_reaches_sampling_and_logprobs(capped: tuple[Gemma, Any], head: Any) -> None:
    model, params = capped
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(0, 1, (8, 1, 32)), jnp.float32)
    logits = np.asarray(model.logits(params, hidden))
    assert 1.9 < np.abs(logits).max() <= 2.0
    uncapped = 2 * np.arctanh(np.clip(logits, -1.99999, 1.99999) / 2)

    words = np.full((8, 1, 11), -1, np.int32)  # 290 tokens, and whether a mask counts
    rows = Rows(
        np.full(8, 0.7, np.float32),
        np.zeros(8, np.int32),
        np.where(np.arange(8) % 2, 0.8, 1.0).astype(np.float32),
        np.zeros(8, np.float32),
        rng.integers(0, 2**32, 8, dtype=np.uint32),
    )
    run = jax.jit(functools.partial(choose, model=model, kernel=None, head=head))

    def step(rows: Rows, logprobs: bool) -> np.ndarray:
        inputs = StepInputs(
            tokens=jnp.zeros((8, 1), jnp.int32),
            n_drafts=jnp.zeros(8, jnp.int32),
            active=jnp.ones(8, bool),
            logprobs=jnp.array(logprobs),
            go=jnp.array(True),
            next_pos=jnp.arange(8, dtype=jnp.int32),
        )
        return np.asarray(run(params, hidden, inputs, words, rows)[0])

    def sampled(logits: np.ndarray, rows: Rows) -> np.ndarray:
        enabled, positions = np.ones((8, 1), np.int32), np.arange(8, dtype=np.int32)[:, None]
        return np.asarray(
            jax.jit(sampler.masked_sample)(
                logits.astype(np.float32), words[..., :-1], enabled, positions, rows
            )
        )[:, 0]

    for each in (rows, rows._replace(top_p=np.ones(8, np.float32))):  # the second in tiles
        expected = sampled(logits, each)
        assert np.any(expected != sampled(uncapped, each))
        np.testing.assert_array_equal(step(each, False)[:, 0], expected)

    answer = step(rows, True)
    own = answer[:, 3:4].copy().view(np.float32)[:, 0]
    wide = logits[:, 0].astype(np.float64)
    total = np.log(np.exp(wide).sum(axis=-1))
    np.testing.assert_allclose(own, wide[np.arange(8), answer[:, 0]] - total, atol=1e-5)


# --- Rounded weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", [TINY2, TINY3], ids=["gemma2", "gemma3"])
def test_int8_weights_give_nearly_the_same_logits(tiny: GemmaConfig) -> None:
    model = Gemma(dataclasses.replace(tiny, num_layers=2, windows=(8, None)))
    state = random_state(model.config)
    params = fill_params(model, state, "huggingface", placer("float32"))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 290, (1, 12)), jnp.int32)

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
        """The mean of the values so far, shifted by queries and keys, so that both take part."""
        count = jnp.arange(1, 13, dtype=jnp.float32)[None, :, None, None]
        return jnp.repeat(jnp.cumsum(v + 0.1 * k, axis=1) / count, 2, axis=2) + 0.1 * q

    @jax.jit
    def logits(params: Any) -> jax.Array:
        return model.logits(params, model.hidden(params, tokens, attend))

    rounded = jax.jit(model.quantize)(params)
    head = model.head(rounded)
    assert isinstance(head.head if isinstance(head, SoftCapped) else head, Int8Matrix)
    assert isinstance(rounded["layers"][0]["qkv"], Int8Matrix)
    exact, approximate = logits(params), logits(rounded)
    error = np.linalg.norm(approximate - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.03
