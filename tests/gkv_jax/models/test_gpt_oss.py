"""gpt-oss: its published configuration, experts in MXFP4 and in int8."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from gkv_jax.errors import UserError
from gkv_jax.models import families
from gkv_jax.models.config import GGUFHeader
from gkv_jax.models.experts import block_rows
from gkv_jax.models.gpt_oss import GptOss, GptOssConfig
from gkv_jax.models.mxfp4 import Mxfp4Checkpoint, dequantize
from gkv_jax.models.parameters import Parameter
from gkv_jax.models.protocol import Params
from gkv_jax.models.rope_config import RopeConfig, YarnScaling
from gkv_jax.weights.huggingface import SafetensorsCheckpoint, read_model
from gkv_jax.weights.parameters import fill_params, placer, to_hf_state_dict, tree_of
from pallas_kernels.int8_matmul import Int8Matrix
from tests.gkv_jax.models.mixed import dense_attend

PUBLISHED = {  # gpt-oss-20b
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


def test_the_published_configuration() -> None:
    model = families.from_hf(PUBLISHED)
    assert isinstance(model, GptOss)
    config = model.config
    assert (config.experts, config.experts_per_token) == (32, 4)
    assert (config.swiglu_alpha, config.swiglu_limit) == (1.702, 7.0)
    assert config.windows == (128, None) * 12
    scaling = config.rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert not scaling.truncate
    assert config.rope == RopeConfig(150000.0, scaling)
    assert config.eos_token_ids == (200002,)
    parameters = sum(int(np.prod(leaf.shape)) for leaf in model.parameters())
    assert parameters == 20_914_757_184
    assert block_rows(1, config.experts_per_token, config.experts) == 1


def test_what_a_file_leaves_out_is_as_in_transformers() -> None:
    from transformers import GptOssConfig

    kept = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    bare = {key: PUBLISHED[key] for key in kept} | {
        "num_hidden_layers": 3,
        "num_local_experts": 128,
    }
    theirs = GptOssConfig(**{key: value for key, value in bare.items() if key != "model_type"})
    assert families.from_hf(bare) == families.from_hf(theirs.to_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, r"quant_method='gptq' is not served"),
        (
            {"quantization_config": {"quant_method": "mxfp4", "group": 16}},
            r"quantization_config\.group=16: not served",
        ),
        ({"experts_per_token": 2}, r"experts_per_token=2 is not served"),
        ({"num_experts_per_tok": 33, "experts_per_token": 33}, r"from 1 to num_local_experts"),
        ({"num_local_experts": None}, r"num_local_experts is missing"),
        ({"swiglu_limit": 0.0}, r"swiglu_limit must be above 0"),
        ({"sliding_window": None}, r"sliding_window is null"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' is not served"),
    ],
)
def test_options_that_are_not_served(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        families.from_hf(PUBLISHED | changes)


def test_gguf_is_refused_with_the_way_out() -> None:
    header = GGUFHeader({"general.architecture": "gpt-oss"}, [])
    with pytest.raises(UserError, match=r"'gpt-oss' is not read from GGUF; load .* Hugging Face"):
        families.from_gguf(header)


# --- MXFP4 --------------------------------------------------------------------------------------


def test_dequantising_equals_transformers() -> None:
    """Every byte under every scale that is a number, but for those that overflow."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    scales = np.repeat(np.arange(253, dtype=np.uint8), 16).reshape(1, 253, 16)
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (1, 253, 16, 16))
    blocks = np.ascontiguousarray(blocks)
    theirs = convert_moe_packed_tensors(
        torch.tensor(blocks), torch.tensor(scales), dtype=torch.bfloat16
    )
    ours = dequantize(blocks, scales)
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours.astype(np.float32), theirs.float().numpy())
    assert len(np.unique(np.abs(ours.astype(np.float32)))) > 500


CONFIG = GptOssConfig(
    architecture="gpt_oss",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    attention_bias=True,
    mlp_bias=True,
    rope=RopeConfig(100.0),
    bos_token_id=None,
    eos_token_ids=(0,),
    windows=(4,),
    experts=8,
    experts_per_token=2,
    swiglu_limit=1.5,
)
MODEL = GptOss(CONFIG)


def random_params() -> Params:
    rng = np.random.default_rng(0)

    def draw(leaf: Parameter) -> jax.Array:
        scale = 0.2 if len(leaf.shape) == 1 or leaf.name.endswith("bias") else 0.3
        mean = 1.0 if "norm" in leaf.name else 0.0
        return jnp.asarray(rng.normal(mean, scale, leaf.tree_shape), jnp.float32)

    return tree_of(MODEL, draw)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Params, dict[str, np.ndarray]]:
    """A folder as it is published, the parameters in it, and the tensors of its file."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(1)
    params = random_params()
    shapes = {"gate_up": (8, 128, 1, 16), "down": (8, 32, 2, 16)}
    halves = {}
    for name, shape in shapes.items():
        blocks = rng.integers(0, 256, shape, dtype=np.uint8)
        scales = rng.integers(120, 126, shape[:-1], dtype=np.uint8)
        theirs = convert_moe_packed_tensors(
            torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
        )
        params["layers"][0][name] = jnp.asarray(theirs.numpy())
        at = f"model.layers.0.mlp.experts.{name}_proj"
        halves |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
    tensors = {
        name: np.ascontiguousarray(array)
        for name, array in to_hf_state_dict(MODEL, params).items()
        if not name.endswith(("gate_up_proj", "down_proj"))
    } | halves
    folder = tmp_path_factory.mktemp("packed")
    save_file(tensors, folder / "model.safetensors")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "head_dim")
    config = PUBLISHED | {key: getattr(CONFIG, key) for key in sizes}
    config |= {
        "num_hidden_layers": 1,
        "layer_types": ["sliding_attention"],
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "num_local_experts": CONFIG.experts,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder, params, tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_published_folder_holds_what_transformers_dequantises(dtype: str, packed: Any) -> None:
    folder, params, _ = packed
    checkpoint = SafetensorsCheckpoint.open(folder)
    got = fill_params(read_model(folder), checkpoint, "huggingface", placer(dtype))
    expected = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    for name in ("gate_up", "down"):  # nothing is rounded
        exact = params["layers"][0][name]
        np.testing.assert_array_equal(got["layers"][0][name].astype(jnp.float32), exact)


def test_damaged_mxfp4_is_an_error(packed: Any) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    tensors = packed[2]
    not_a_number = np.full_like(tensors[scales], 255)
    for changed, message in (
        ({key: tensors[key] for key in tensors if key != scales}, "_scales is missing"),
        (tensors | {blocks: tensors[blocks][..., :8]}, r"is no MXFP4: _blocks .* \[8, 32, 2, 8\]"),
        (tensors | {scales: tensors[scales].astype(np.float32)}, "_scales float32"),
        (tensors | {scales: not_a_number}, "damaged"),
        (tensors | {scales: not_a_number - 1}, "numbers that are not finite; it is damaged"),
        (tensors | {scales: not_a_number - 2}, "numbers that are not finite; it is damaged"),
    ):
        with pytest.raises(UserError, match=message):
            fill_params(MODEL, changed, "huggingface", placer("float32"))
    assert "x" not in Mxfp4Checkpoint(tensors)


# --- int8 ---------------------------------------------------------------------------------------


@jax.jit
def logits(params: Params, tokens: jax.Array) -> jax.Array:
    """Logits ``[T,V]`` of a text, without a cache."""
    hidden = MODEL.hidden(params, tokens[None], dense_attend(MODEL, tokens.shape[0]))
    return MODEL.logits(params, hidden[0])


def as_floats(matrix: Int8Matrix) -> np.ndarray:
    return np.asarray(matrix.values) * np.asarray(matrix.scale)[:, None]


def test_int8_logits_are_those_of_the_rounded_weights() -> None:
    params = random_params()
    rounded = jax.jit(MODEL.quantize)(params)
    layer = rounded["layers"][0]
    matrices = {name: leaf for name, leaf in layer.items() if isinstance(leaf, Int8Matrix)}
    assert set(matrices) == {"qkv", "o", "gate_up", "down"}  # the router is not rounded
    rows = {name: as_floats(matrix) for name, matrix in matrices.items()}
    widths = np.cumsum([32, 16])
    floats = dict(zip("qkv", (part.T for part in np.split(rows.pop("qkv"), widths)), strict=True))
    floats["o"] = rows.pop("o").T
    for name, matrix in rows.items():
        floats[name] = matrix.reshape(CONFIG.experts, -1, matrix.shape[1]).swapaxes(1, 2)
        assert 0 < np.abs(floats[name] - params["layers"][0][name]).max() < 0.01
    same = {**params, "head": jnp.asarray(as_floats(rounded["head"]))}
    same["layers"] = [params["layers"][0] | jax.tree.map(jnp.asarray, floats)]

    text = jnp.asarray(np.random.default_rng(3).integers(0, 61, 24), jnp.int32)
    expected, got = logits(same, text), logits(rounded, text)
    assert float(jnp.abs(expected).max()) > 1
    np.testing.assert_allclose(got, expected, rtol=0, atol=3e-3)  # activations have 15 bits
    # Few tokens go to their experts one by one, 24 of them all to each.
    assert (block_rows(4, 2, 8), block_rows(24, 2, 8)) == (1, 24)
    np.testing.assert_allclose(logits(rounded, text[:4]), got[:4], rtol=0, atol=1e-4)
