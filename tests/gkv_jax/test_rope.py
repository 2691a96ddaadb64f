"""Angles exact at any position; frequencies and factors equal to transformers'."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gkv_jax.models.fields import Fields
from gkv_jax.models.rope_config import Llama3Scaling, RopeConfig, YarnScaling
from gkv_jax.rope import Rope, inverse_frequencies, rotate

LLAMA3 = RopeConfig(500_000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))
YARN = RopeConfig(10_000.0, YarnScaling(4.0, 64, 1.3), partial_rotary_factor=0.5)
angles_of = jax.jit(lambda positions, rope: rope.angles(positions), static_argnames="rope")


@pytest.mark.parametrize("config", [RopeConfig(10_000.0), LLAMA3, YARN])
@settings(deadline=None, max_examples=100)
@example([0, 1, 255, 256, 65_535, 65_536, 16_777_216, 2**31 - 1])
@example([2**31, 2**31 + 12_345, 2**32 - 1, 0, 0, 0, 0, 0])
@given(st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8))
def test_angles_are_exact_for_every_uint32_position(config: RopeConfig, positions: Any) -> None:
    kinds = [np.uint32, np.int32] if max(positions) < 2**31 else [np.uint32]
    angle = np.array(positions, np.float64)[:, None] * inverse_frequencies(config, 64)
    for kind in kinds:
        cos, sin = angles_of(jnp.asarray(np.array(positions, kind)), Rope(config, 64))
        np.testing.assert_allclose(cos, np.cos(angle), rtol=0, atol=1e-6)
        np.testing.assert_allclose(sin, np.sin(angle), rtol=0, atol=1e-6)


def test_the_textbook_form_would_not_be() -> None:
    """The reason for the digit tables; if float32 were good enough, they could go."""
    inv_freq = inverse_frequencies(RopeConfig(10_000.0), 64)
    position = 16_777_215
    textbook = np.cos(np.float32(position) * inv_freq.astype(np.float32))
    assert np.abs(textbook - np.cos(position * inv_freq)).max() > 0.1


YARN_OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "not truncated": {"truncate": False},
    "betas": {"beta_fast": 16.0, "beta_slow": 2.0},
    "steep": {"beta_fast": 3.0, "beta_slow": 3.0, "truncate": False},
    "own attention factor": {"attention_factor": 1.25},
    "DeepSeek": {"mscale": 1.0, "mscale_all_dim": 0.8},
    "mscale alone": {"mscale": 0.7},
    "short": {"original_max_position_embeddings": 32, "factor": 2.0},
    # The ramp would end beyond the head.
    "low base": {"rope_theta": 10.0, "original_max_position_embeddings": 900},
    "shrinking": {"factor": 0.5},
    "factor from the lengths": {"factor": None},
}
FREQUENCIES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, partial": {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.25},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    },
    **{
        f"yarn, {name}": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            **options,
        }
        for name, options in YARN_OPTIONS.items()
    },
    "yarn, partial": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "partial_rotary_factor": 0.5,
    },
}


@pytest.mark.parametrize("name", FREQUENCIES)
def test_frequencies_and_factors_equal_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=65_536,
        rope_parameters={"rope_theta": 10_000.0, **FREQUENCIES[name]},
    )
    config = RopeConfig.from_hf(Fields(theirs.to_dict(), ""), theirs.max_position_embeddings)
    init = {"default": LlamaRotaryEmbedding.compute_default_rope_parameters} | ROPE_INIT_FUNCTIONS
    frequencies, factor = init[FREQUENCIES[name]["rope_type"]](theirs)

    # float32 there, and a ramp's end subtracts nearly equal numbers.
    np.testing.assert_allclose(inverse_frequencies(config, 64), frequencies.numpy(), rtol=2e-6)
    assert Rope(config, 64).attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("rope_type", ["default", "yarn"])
def test_products_of_partly_rotated_heads_equal_transformers(rope_type: str) -> None:
    """Phi turns part of each head; YaRN's factor applies to those channels alone, and twice."""
    import torch
    from transformers import PhiConfig
    from transformers.models.phi.modeling_phi import PhiRotaryEmbedding, apply_rotary_pos_emb

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    theirs = PhiConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=256,
        partial_rotary_factor=0.5,
        rope_parameters={"rope_theta": 1e3, **(yarn if rope_type == "yarn" else {})},
    )
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 4, 9, 32)).astype(np.float32)  # batch, heads, tokens, width
    positions = np.array([[0, 1, 2, 30, 63, 64, 100, 254, 255]])
    cos, sin = PhiRotaryEmbedding(theirs)(torch.from_numpy(q), torch.from_numpy(positions))
    turned = apply_rotary_pos_emb(
        torch.from_numpy(q[..., :16]), torch.from_numpy(k[..., :16]), cos, sin
    )
    q_theirs, k_theirs = (
        np.concatenate([part.numpy(), x[..., 16:]], axis=-1)
        for part, x in zip(turned, (q, k), strict=True)
    )

    rope = Rope(RopeConfig.from_hf(Fields(theirs.to_dict(), ""), 256), 32)
    assert (rope.attention_factor > 1.1) == (rope_type == "yarn")
    angles = rope.angles(jnp.asarray(positions, jnp.int32)[:, None])
    q_ours, k_ours = (
        rotate(jnp.asarray(q), rope.for_queries(angles)),
        rotate(jnp.asarray(k), angles),
    )
    np.testing.assert_allclose(
        q_ours @ k_ours.swapaxes(-1, -2), q_theirs @ k_theirs.swapaxes(-1, -2), atol=2e-4
    )


def test_keys_may_be_rotated_again() -> None:
    """Under YaRN, too: to be turned by 7 and then by 93 is to be turned by 100."""
    rope = Rope(YARN, 64)
    k = jnp.asarray(np.random.default_rng(2).normal(size=(1, 64)), jnp.float32)

    def turned(x: jax.Array, by: int) -> jax.Array:
        return rotate(x, rope.angles(jnp.array([by], jnp.int32)))

    np.testing.assert_allclose(turned(turned(k, 7), 93), turned(k, 100), atol=1e-5)


def test_channels_that_do_not_turn_are_untouched() -> None:
    x = jnp.asarray(np.random.default_rng(3).normal(size=(1, 64)), jnp.bfloat16)
    rope = Rope(YARN, 64)
    out = rotate(x, rope.for_queries(rope.angles(jnp.array([1000], jnp.int32))))
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(out[:, 32:], x[:, 32:])
    assert not np.any(np.asarray(out[:, :32]) == np.asarray(x[:, :32]))


def test_rotation_depends_on_differences_only() -> None:
    rng, rope = np.random.default_rng(1), Rope(RopeConfig(10_000.0), 64)
    q, k = (jnp.asarray(rng.normal(size=(1, 64)), jnp.float32) for _ in range(2))

    def product(at: int, to: int) -> float:
        a, b = (rope.angles(jnp.array([p], jnp.int32)) for p in (at, to))
        return float(jnp.sum(rotate(q, a) * rotate(k, b)))

    assert product(1_000_000_007, 1_000_000_000) == pytest.approx(product(7, 0), abs=1e-4)
