"""Angles exact at any position; frequencies equal to transformers'."""

import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax.models.config import LinearScaling, Llama3Scaling, RopeConfig
from gkv_jax.rope import Rope, inverse_frequencies, rotate

LLAMA3 = RopeConfig(500_000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize("config", [RopeConfig(10_000.0), LLAMA3])
def test_angles_are_exact_for_every_int32_position(config: RopeConfig) -> None:
    rng = np.random.default_rng(0)
    edges = [0, 1, 255, 256, 65_535, 65_536, 16_777_216, 2**31 - 1]
    positions = np.concatenate([edges, rng.integers(0, 2**31, 200)])
    cos, sin = Rope(config, 64).angles(jnp.asarray(positions, jnp.int32))
    angle = positions[:, None] * inverse_frequencies(config, 64)
    np.testing.assert_allclose(cos, np.cos(angle), rtol=0, atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angle), rtol=0, atol=1e-6)


def test_the_textbook_form_would_not_be() -> None:
    """The reason for the digit tables; if float32 were good enough, they could go."""
    inv_freq = inverse_frequencies(RopeConfig(10_000.0), 64)
    position = 16_777_215
    textbook = np.cos(np.float32(position) * inv_freq.astype(np.float32))
    assert np.abs(textbook - np.cos(position * inv_freq)).max() > 0.1


@pytest.mark.parametrize(
    ("config", "rope_type", "parameters"),
    [
        (RopeConfig(10_000.0), "default", {}),
        (RopeConfig(10_000.0, LinearScaling(4.0)), "linear", {"factor": 4.0}),
        (
            LLAMA3,
            "llama3",
            {
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
    ],
)
def test_frequencies_equal_transformers(
    config: RopeConfig, rope_type: str, parameters: dict[str, float]
) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=256,
            num_attention_heads=4,
            rope_parameters={"rope_type": rope_type, "rope_theta": config.theta, **parameters},
        )
    ).inv_freq
    np.testing.assert_allclose(inverse_frequencies(config, 64), theirs.numpy(), rtol=1e-6)


def test_rotation_depends_on_differences_only() -> None:
    rng, rope = np.random.default_rng(1), Rope(RopeConfig(10_000.0), 64)
    q, k = (jnp.asarray(rng.normal(size=(1, 64)), jnp.float32) for _ in range(2))

    def product(at: int, to: int) -> float:
        a, b = (rope.angles(jnp.array([p], jnp.int32)) for p in (at, to))
        return float(jnp.sum(rotate(q, a) * rotate(k, b)))

    assert product(1_000_000_007, 1_000_000_000) == pytest.approx(product(7, 0), abs=1e-4)
