"""Every family against transformers, on tiny random models that ``save_pretrained`` wrote.

A family is one entry in ``CASES``; the tests below are the same for all.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version

from gkv_jax import CacheSpec, UserError
from gkv_jax.cache import Cache, init_cache
from gkv_jax.evaluate import streaming_nll
from gkv_jax.evaluate.dense import reference_nll
from gkv_jax.models import families
from gkv_jax.models.protocol import Decoder
from gkv_jax.models.transformer import Transformer
from gkv_jax.prefill import chunk_hidden
from gkv_jax.step import StepInputs, forward
from gkv_jax.weights import load_model
from gkv_jax.weights.huggingface import SafetensorsCheckpoint, read_model
from gkv_jax.weights.parameters import fill_params, placer, to_hf_state_dict
from pallas_kernels.int8_matmul import Int8Matrix
from tests.gkv_jax.models.test_gemma import GEMMA2_2B, GEMMA3_1B, GEMMA3_4B
from tests.gkv_jax.models.test_gpt_oss import PUBLISHED as GPT_OSS_20B
from tests.gkv_jax.weights.conftest import JUNK, add_field, hf_config
from tests.gkv_jax.weights.conftest import TINY as TINY_LLAMA
from tests.gkv_jax.weights.test_config import LLAMA3
from tests.gkv_jax.weights.test_gguf_tokenizer import LLAMA2, metadata, sentencepiece_metadata

WINDOW = 8
PROMPT = np.random.default_rng(0).integers(0, 256, 30).tolist()
CHUNK = 10  # of the prompt; not a multiple of the window
NEW = 20
SPEC = CacheSpec.full(64)

OPTIONS: dict[str, Any] = {
    "vocab_size": 290,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": WINDOW,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "initializer_range": 0.3,  # larger than the default, so that attention is not nearly uniform
    "eos_token_id": 256,
    "bos_token_id": None,
    "pad_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}


class Case(NamedTuple):
    """A family: the configuration's class in transformers, its options beside ``OPTIONS``, and the
    windows that its layers must have."""

    config: str
    options: dict[str, Any]
    windows: tuple[int | None, ...]


CASES = {
    "llama": Case(
        "LlamaConfig",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": YARN | {"rope_theta": 500.0, "original_max_position_embeddings": 16},
        },
        (None, None),
    ),
    "mistral": Case("MistralConfig", {}, (WINDOW, WINDOW)),
    "qwen2": Case(
        "Qwen2Config", {"use_sliding_window": True, "max_window_layers": 1}, (None, WINDOW)
    ),
    "qwen3": Case("Qwen3Config", {"head_dim": 16, "attention_bias": True}, (None, None)),
    "gemma2": Case(
        "Gemma2Config",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,  # low enough to be met
            "final_logit_softcapping": 5.0,
        },
        (WINDOW, None),
    ),
    "gemma3": Case(
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        (WINDOW, None),
    ),
    "gpt-oss": Case(
        "GptOssConfig",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 2.0,  # low enough to be met
            "rope_parameters": YARN | {"truncate": False, "original_max_position_embeddings": 32},
        },
        (WINDOW, None),
    ),
}


class Pair(NamedTuple):
    theirs: Any
    model: Transformer
    params: Any


def random_model(config: Any) -> Any:
    """A transformers model whose biases and norms are not 0 and 1, as in life."""
    torch.manual_seed(0)
    # Written out: transformers' faster ways leave Gemma 2's soft cap out, in some versions.
    written_out = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **written_out).eval()
    offset = "gemma" in config.model_type  # norms multiply by 1 + w there
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or name.endswith("bias"):
            mean = float("norm" in name and not offset)
            torch.nn.init.normal_(parameter, mean=mean, std=1.0 if "sinks" in name else 0.2)
    return model


def write(folder: Path, config: str, **options: Any) -> Any:
    options = OPTIONS | options
    if config == "LlamaConfig":
        del options["sliding_window"]  # it would write it down, unused
    model = random_model(getattr(transformers, config)(**options))
    model.save_pretrained(folder)
    return model


def load(folder: Path) -> tuple[Transformer, Any]:
    model = read_model(folder)
    checkpoint = SafetensorsCheckpoint.open(folder)
    return model, fill_params(model, checkpoint, "huggingface", placer("float32"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    @functools.cache
    def make(name: str) -> Pair:
        folder = tmp_path_factory.mktemp(name)
        theirs = write(folder, CASES[name].config, **CASES[name].options)
        return Pair(theirs, *load(folder))

    return make


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def step(
    params: Any, cache: Cache, token: jax.Array, at: jax.Array, *, model: Decoder
) -> tuple[jax.Array, Cache]:
    """Logits ``[V]`` after one token."""
    inputs = StepInputs(
        tokens=token[None, None],
        n_drafts=jnp.zeros(1, jnp.int32),
        active=jnp.array([True]),
        logprobs=jnp.array(False),
        go=jnp.array(True),
        next_pos=at[None],
    )
    hidden, cache, _ = forward(params, cache, inputs, model=model, spec=SPEC)
    return model.logits(params, hidden[0, 0]), cache


def prompt_logits(model: Transformer, params: Any) -> tuple[np.ndarray, Cache]:
    cache = init_cache(SPEC, model, 1, jnp.float32)
    logits = []
    for start in range(0, len(PROMPT), CHUNK):
        at = (np.int32(0), np.int32(start), np.int32(CHUNK))
        tokens = np.asarray(PROMPT[start : start + CHUNK], np.int32)
        hidden, cache = chunk_hidden(params, cache, tokens, *at, model=model, spec=SPEC)
        logits.append(np.asarray(model.logits(params, hidden)))
    return np.concatenate(logits), cache


def greedy(model: Transformer, params: Any) -> tuple[list[int], np.ndarray]:
    """``PROMPT`` and ``NEW`` greedy tokens, and the logits ``[T,V]`` of all but the last."""
    first, cache = prompt_logits(model, params)
    tokens, logits = [*PROMPT, int(first[-1].argmax())], [first]
    while len(tokens) < len(PROMPT) + NEW:
        at = np.int32(len(tokens) - 1)
        row, cache = step(params, cache, np.int32(tokens[-1]), at, model=model)
        logits.append(np.asarray(row)[None])
        tokens.append(int(logits[-1].argmax()))
    return tokens, np.concatenate(logits)


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, pair: Callable[[str], Pair]) -> None:
    """The prompt in pieces and then token by token, several times the model's own window."""
    if name == "gpt-oss" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("transformers 5.15 computes other logits of the same weights than 5.24")
    theirs, model, params = pair(name)
    assert tuple(layer.window for layer in model.layers) == CASES[name].windows
    tokens, logits = greedy(model, params)
    assert len(tokens) > 6 * WINDOW
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens[:-1]])).logits[0].numpy()
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    # Their greedy token after each of our prefixes is ours: both wrote the same text.
    assert expected[len(PROMPT) - 1 :].argmax(-1).tolist() == tokens[len(PROMPT) :]


@pytest.mark.parametrize("name", CASES)
def test_the_state_dict_comes_back(name: str, pair: Callable[[str], Pair]) -> None:
    theirs, model, params = pair(name)
    expected = theirs.state_dict()
    state = to_hf_state_dict(model, params)
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(state[key], value.numpy())


@pytest.mark.parametrize("name", CASES)
def test_a_bounded_cache_is_streaming_by_its_definition(
    name: str, pair: Callable[[str], Pair]
) -> None:
    """Sinks and a window in the layers that see everything, the others keep their own window."""
    _, model, params = pair(name)
    spec = CacheSpec(sinks=3, window=13)
    text = np.random.default_rng(1).integers(0, 256, 160)
    cache = jax.eval_shape(lambda: init_cache(spec, model, 1, jnp.float32))
    slots = [layer.k.data.shape[2] for layer in cache.layers]
    assert max(slots) <= spec.total < len(text) / 5
    streamed = streaming_nll(model, params, text, spec, chunk=32)
    assert np.isfinite(streamed).all()
    np.testing.assert_allclose(
        streamed, reference_nll(model, params, text, spec), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("name", CASES)
def test_int8_rounds_the_linear_weights(name: str, pair: Callable[[str], Pair]) -> None:
    _, model, params = pair(name)
    rounded = jax.eval_shape(model.quantize, params)
    for before, after in zip(params["layers"], rounded["layers"], strict=True):
        matrices = {key for key, leaf in after.items() if isinstance(leaf, Int8Matrix)}
        assert matrices == {"qkv", "o", "gate_up", "down"}
        for key in before.keys() & after.keys() - matrices:
            assert after[key].shape == before[key].shape
    assert rounded["embed"].dtype == jnp.float32


def test_int8_with_biases_on_a_part_of_the_fused_weights(pair: Callable[[str], Pair]) -> None:
    _, model, params = pair("qwen2")
    unbiased = [
        {name: leaf * float(not name.endswith("_bias")) for name, leaf in layer.items()}
        for layer in params["layers"]
    ]
    exact, _ = prompt_logits(model, params)
    other, _ = prompt_logits(model, params | {"layers": unbiased})
    approximate, _ = prompt_logits(model, jax.jit(model.quantize)(params))
    assert 0 < np.linalg.norm(approximate - exact) < 0.1 * np.linalg.norm(exact)
    assert np.linalg.norm(other - exact) > 0.2 * np.linalg.norm(exact)


# --- GGUF ---------------------------------------------------------------------------------------


def write_gguf(path: Path, theirs: Any, architecture: str, tokenizer: dict[str, Any]) -> None:
    """What llama.cpp's converter writes for these architectures; names are of the gguf package."""
    config, writer = theirs.config, gguf.GGUFWriter(path, architecture)
    arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    head_dim = theirs.model.layers[0].self_attn.head_dim
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None) is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim)
    for key, value in tokenizer.items():
        add_field(writer, key, value)
    for key, value in theirs.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy()
        rotated = key.rpartition(".")[0].endswith(("q_proj", "k_proj"))
        if architecture == "llama" and rotated:
            pairs = array.reshape(-1, 2, head_dim // 2, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight", ".bias")), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("config", "options", "architecture", "pre"),
    [
        ("LlamaConfig", {"attention_bias": True}, "llama", None),  # Llama 2
        ("LlamaConfig", {}, "llama", "llama-bpe"),  # Llama 3
        ("MistralConfig", {"sliding_window": None}, "llama", None),
        ("MistralConfig", {"sliding_window": None, "head_dim": 16}, "llama", "tekken"),  # Nemo
        ("Qwen2Config", {"tie_word_embeddings": True}, "qwen2", "qwen2"),
        ("Qwen3Config", {"head_dim": 16}, "qwen3", "qwen2"),
    ],
)
def test_gguf_files_hold_what_safetensors_do(
    config: str, options: dict[str, Any], architecture: str, pre: str | None, tmp_path: Path
) -> None:
    """Whole files, tokenizers included, one for each that ``docs/models.md`` lists."""
    theirs = write(tmp_path / "folder", config, vocab_size=300, **options)
    tokenizer = sentencepiece_metadata(**LLAMA2) if pre is None else metadata(pre=pre)
    tokenizer.pop("llama.context_length", None)
    write_gguf(tmp_path / "model.gguf", theirs, architecture, tokenizer)
    model, params = load(tmp_path / "folder")
    loaded = load_model(tmp_path / "model.gguf", "float32")
    ids = {"bos_token_id": 2, "eos_token_ids": (1,)} if pre is None else {
        "bos_token_id": 256, "eos_token_ids": (257,)
    }  # fmt: skip
    expected = dataclasses.replace(model.config, architecture=architecture, **ids)
    assert loaded.config == expected
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    encoded = loaded.tokenizer.encode("hello  12")
    assert loaded.tokenizer.decode(encoded, skip_special_tokens=True) == "hello  12"
    assert max(encoded) < loaded.config.vocab_size


# --- config.json --------------------------------------------------------------------------------

QWEN2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL_7B_0_1 = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
MISTRAL_NEMO = MISTRAL_7B_0_1 | {
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 1024000,
    "num_hidden_layers": 40,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "transformers_version": "4.43.0.dev0",
    "vocab_size": 131072,
}
LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}


@pytest.mark.parametrize(
    ("published", "changes", "windows"),
    [
        (LLAMA_3_2_1B, {}, ()),
        (SMOLLM2_135M, {}, ()),
        (MISTRAL_NEMO, {}, ()),
        (MISTRAL_7B_0_1, {}, (4096,) * 32),
        (MISTRAL_7B_0_1, {"sliding_window": None}, ()),
        (QWEN2_5_0_5B, {}, ()),
        (QWEN2_5_0_5B, {"use_sliding_window": True}, (None,) * 21 + (32768,) * 3),
        (QWEN2_5_0_5B, {"use_sliding_window": True, "sliding_window": None}, ()),
        (QWEN3_0_6B, {}, ()),
        (
            QWEN3_0_6B,
            {
                "num_hidden_layers": 2,
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (64, None),
        ),
    ],
)
def test_published_configurations(
    published: dict[str, Any], changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    model = families.from_hf(published | changes)
    config = model.config
    assert config.windows == windows
    assert (config.hidden_size, config.head_dim) == (
        published["hidden_size"],
        published.get("head_dim", published["hidden_size"] // published["num_attention_heads"]),
    )
    assert config.rope.theta == published["rope_theta"]
    assert config.tie_word_embeddings == published["tie_word_embeddings"]
    names = {leaf.name for leaf in model.layer_parameters(0)}
    assert ("q_norm" in names) == (published is QWEN3_0_6B)
    biases = {"q_bias", "k_bias", "v_bias"} if published is QWEN2_5_0_5B else set()
    assert {name for name in names if name.endswith("bias")} == biases


SIZES = {
    "vocab_size": 290,
    "hidden_size": 256,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 32,
    "eos_token_id": 1,
    "bos_token_id": None,
}


@pytest.mark.parametrize("name", CASES)
def test_absent_fields_are_transformers_defaults(name: str) -> None:
    theirs = getattr(transformers, CASES[name].config)(**SIZES, num_local_experts=8)
    bare = SIZES | {"model_type": theirs.model_type}
    bare |= {"num_local_experts": 8} if name == "gpt-oss" else {}
    written = {k: v for k, v in theirs.to_dict().items() if name == "gpt-oss" or "expert" not in k}
    assert families.from_hf(bare) == families.from_hf(written)
    assert families.from_hf(bare | {"num_key_value_heads": None}).num_kv_heads == 32


def test_null_is_not_absent() -> None:
    """null turns Mistral's window off; absent, it is 4096."""
    bare = {key: value for key, value in MISTRAL_7B_0_1.items() if key != "sliding_window"}
    assert families.from_hf(bare).config.windows == (4096,) * 32


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MISTRAL_7B_0_1 | {"hidden_act": "gelu"}, "hidden_act='gelu' is not served"),
        (MISTRAL_7B_0_1 | {"sliding_window": 0}, "sliding_window must be at least 1, not 0"),
        (MISTRAL_7B_0_1 | {"num_local_experts": 8}, "config.json: num_local_experts=8"),
        (QWEN2_5_0_5B | {"layer_types": ["full_attention"] * 23 + ["linear_attention"]}, "linear_"),
        (
            QWEN2_5_0_5B | {"layer_types": ["full_attention"] * 3},
            "layer_types are 3, but num_hid",
        ),
        (QWEN3_0_6B | {"layer_types": ["sliding_attention"] * 28}, "sliding_window is null"),
        (QWEN3_0_6B | {"attention_bias": "yes"}, "attention_bias must be true or false"),
        (QWEN3_0_6B | {"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a finite number"),
        (QWEN3_0_6B | {"hidden_size": 1024.0}, "hidden_size must be an integer, not 1024.0"),
        (QWEN3_0_6B | {"model_type": "qwen3_moe"}, "'qwen3_moe' is not served; known: llama, mist"),
        (
            QWEN3_0_6B | {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config with quant_method='gptq' is not served; take the repository",
        ),
        (MISTRAL_7B_0_1 | {"sliding_window": 4096.5}, "sliding_window must be an integer, not 40"),
        (MISTRAL_7B_0_1 | {"sliding_window": True}, "sliding_window must be an integer, not True"),
        (
            QWEN3_0_6B | {"architectures": ["Qwen2ForCausalLM"]},
            r"for model_type 'qwen3' \(served: Qw",
        ),
    ],
)
def test_what_is_not_served_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        families.from_hf(config)
    assert "\n" not in str(caught.value)


def paths(config: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where its values are, inner objects' too."""
    for key, value in config.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from paths(value, (*at, key))


def put(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = path
    return config | {first: put(config[first], tuple(rest), value) if rest else value}


@pytest.mark.parametrize(
    "published",
    [
        hf_config(TINY_LLAMA, rope_scaling=LLAMA3),
        MISTRAL_7B_0_1,
        QWEN2_5_0_5B,
        QWEN3_0_6B,
        GEMMA2_2B,
        GEMMA3_1B,
        GEMMA3_4B,
        GPT_OSS_20B,
    ],
    ids=["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3-images", "gpt-oss"],
)
def test_every_field_mistyped_is_an_error_or_harmless(published: dict[str, Any]) -> None:
    optional = ("architectures", "layer_types", "rope_parameters", "rope_scaling", "sliding_window")
    config = dict.fromkeys(optional) | published
    families.from_hf(config)
    for path in paths(config):
        for value in JUNK:
            with contextlib.suppress(UserError):
                families.from_hf(put(config, path, value))
    for value in JUNK:
        with contextlib.suppress(UserError):
            families.from_hf(config, {"eos_token_id": value})


def test_a_wrong_shape_names_the_tensor_and_both_shapes(pair: Callable[[str], Pair]) -> None:
    theirs, model, _ = pair("qwen3")
    state = {key: value.numpy() for key, value in theirs.state_dict().items()}
    key = "model.layers.1.self_attn.q_norm.weight"
    with pytest.raises(UserError, match=rf"{key} \[32\] instead of \[16\]"):
        fill_params(model, state | {key: np.ones(32, "f")}, "huggingface", placer("float32"))
