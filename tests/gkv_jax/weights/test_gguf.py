"""GGUF files written by the gguf package: configuration, dequantisation, head order, damage."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from gkv_jax.errors import UserError
from gkv_jax.models import families
from gkv_jax.models.config import GGUFHeader, ModelConfig
from gkv_jax.models.llama import Llama
from gkv_jax.models.rope_config import LinearScaling, Llama3Scaling
from gkv_jax.weights import fill_params, load_model, to_hf_state_dict
from gkv_jax.weights.gguf import GGUFCheckpoint
from gkv_jax.weights.parameters import placer

from .conftest import TINY, State, random_state


def load(path: Path) -> tuple[ModelConfig, State]:
    checkpoint = GGUFCheckpoint.open(path)
    params = fill_params(checkpoint.model, checkpoint, "gguf", placer("float32"))
    return checkpoint.model.config, to_hf_state_dict(checkpoint.model, params)


@pytest.mark.parametrize("quantisation", ["F32", "F16", "BF16"])
def test_equals_the_source(
    any_config: ModelConfig, write_gguf: Callable[..., Path], quantisation: str
) -> None:
    state = random_state(any_config)
    config, loaded = load(write_gguf(any_config, state, quantisation=quantisation))
    assert config == any_config
    tolerance = {"F32": 0.0, "F16": 1e-3, "BF16": 8e-3}[quantisation]
    for name, array in state.items():
        np.testing.assert_allclose(loaded[name], array, rtol=tolerance, atol=tolerance)


def test_quantised_blocks_dequantise_as_the_gguf_package_does(
    write_gguf: Callable[..., Path],
) -> None:
    state = random_state(TINY)
    path = write_gguf(TINY, state, quantisation="Q8_0")
    _, loaded = load(path)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensor = theirs["blk.1.ffn_gate.weight"]
    np.testing.assert_array_equal(
        loaded["model.layers.1.mlp.gate_proj.weight"],
        gguf.dequantize(tensor.data, tensor.tensor_type),
    )
    # a permutation of rows commutes with blocks along rows
    np.testing.assert_allclose(
        loaded["model.layers.1.self_attn.k_proj.weight"],
        state["model.layers.1.self_attn.k_proj.weight"],
        atol=0.02,
    )


def test_arrays_outlive_the_file(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(TINY, random_state(TINY))
    norm = GGUFCheckpoint.open(path)["output_norm.weight"]
    assert norm.flags.owndata
    assert type(norm) is np.ndarray


def test_load_model(write_gguf: Callable[..., Path]) -> None:
    model = load_model(write_gguf(TINY, random_state(TINY)), "bfloat16")
    assert model.config == TINY
    assert model.params["embed"].dtype == "bfloat16"
    assert model.tokenizer.decode(model.tokenizer.encode("hello")) == "hello"


# --- configuration ------------------------------------------------------------------------------


def rope_factors(scaling: Llama3Scaling, theta: float, width: int) -> np.ndarray:
    """The divisors of Llama 3, by cases as its reference code has them."""
    low = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high = scaling.original_max_position_embeddings / scaling.high_freq_factor
    divisors = []
    for pair in range(width // 2):
        wavelength = 2 * np.pi * theta ** (2 * pair / width)
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(scaling.factor)
        else:
            smooth = (
                scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor
            ) / (scaling.high_freq_factor - scaling.low_freq_factor)
            divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_read_from_its_tensor(
    write_gguf: Callable[..., Path], factor: float
) -> None:
    scaling = Llama3Scaling(factor, 1.0, 4.0, 8192)
    config = replace(
        TINY, hidden_size=256, head_dim=64, rope=replace(TINY.rope, theta=5e5, scaling=scaling)
    )
    factors = rope_factors(scaling, 5e5, 64)
    assert len(set(factors)) > 2  # kept, interpolated and divided
    path = write_gguf(config, random_state(config), extra={"rope_freqs.weight": factors})
    loaded, _ = load(path)
    assert loaded == config


def test_other_rope_factors_are_refused(write_gguf: Callable[..., Path]) -> None:
    extra = {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}
    with pytest.raises(UserError, match=r"rope_freqs.weight"):
        load(write_gguf(TINY, random_state(TINY), extra=extra))


def test_linear_scaling(write_gguf: Callable[..., Path]) -> None:
    def settings(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    config, _ = load(write_gguf(TINY, random_state(TINY), settings=settings))
    assert config.rope.scaling == LinearScaling(4.0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "scaling.factor is missing"),
        (lambda w: w.add_expert_count(8), "expert_count"),
        (lambda w: w.add_sliding_window(64), "sliding_window"),
        (lambda w: w.add_logit_scale(0.5), "logit_scale"),
        (lambda w: w.add_key_length(32), "value_length|rope.dimension_count"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    write_gguf: Callable[..., Path], settings: Callable[[Any], None], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        load(write_gguf(TINY, random_state(TINY), settings=settings))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (lambda w: w.add_uint16("split.count", 2), r"split\.count=2: .*llama-gguf-split --merge"),
        (lambda w: w.add_string("split.count", "2"), r"split\.count must be an integer"),
        (lambda w: w.add_type("adapter"), r"general\.type='adapter' is no model"),
    ],
)
def test_what_is_no_whole_model(
    write_gguf: Callable[..., Path], settings: Callable[[Any], None], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        load_model(write_gguf(TINY, random_state(TINY), settings=settings))


def test_unknown_architecture(write_gguf: Callable[..., Path]) -> None:
    metadata = GGUFCheckpoint.open(write_gguf(TINY, random_state(TINY))).metadata
    with pytest.raises(UserError, match="'bert' is not served; known: llama, qwen2, "):
        families.from_gguf(GGUFHeader(metadata | {"general.architecture": "bert"}, ()))
    incomplete = {k: v for k, v in metadata.items() if "block" not in k}
    with pytest.raises(UserError, match=r"llama.block_count"):
        families.from_gguf(GGUFHeader(incomplete, ()))


# --- damage -------------------------------------------------------------------------------------


def test_missing_and_unexpected_tensors(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(
        TINY, random_state(TINY), extra={"blk.0.attn_q_norm.weight": np.ones(16, "f")}
    )
    with pytest.raises(UserError, match=r"unexpected: blk.0.attn_q_norm.weight"):
        load(path)
    checkpoint = GGUFCheckpoint.open(path)
    fewer = {name: checkpoint[name] for name in checkpoint if "ffn_up" not in name}
    with pytest.raises(UserError, match=r"missing: blk.0.ffn_up.weight, blk.1.ffn_up.weight"):
        fill_params(Llama(TINY), fewer, "gguf", placer("float32"))


def test_cut_anywhere(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(TINY, random_state(TINY))
    whole = path.read_bytes()
    for length in [4, 8, 23, 24, 40, 500, 2000, 5000, len(whole) // 2, len(whole) - 64]:
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"truncated or damaged .*download") as caught:
            GGUFCheckpoint.open(path)
        assert "\n" not in str(caught.value)


def test_random_damage_in_the_header_is_an_error_or_harmless(
    write_gguf: Callable[..., Path],
) -> None:
    path = write_gguf(TINY, random_state(TINY))
    whole = bytearray(path.read_bytes())
    rng = np.random.default_rng(1)
    for _ in range(200):
        damaged = whole.copy()
        damaged[int(rng.integers(4, 8000))] = int(rng.integers(256))
        path.write_bytes(damaged)
        with contextlib.suppress(UserError):
            load(path)


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(UserError, match="does not start with GGUF"):
        load_model(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="does not start with GGUF"):
        load_model(path)
    with pytest.raises(UserError, match="No such file"):
        load_model(tmp_path / "other.gguf")


def test_other_version(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(16))
    with pytest.raises(UserError, match="version 1"):
        GGUFCheckpoint.open(path)
