"""Random tiny models, the same everywhere so that compiled functions are shared between tests."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from gkv_jax.models.config import ModelConfig
from gkv_jax.models.rope_config import RopeConfig
from gkv_jax.weights import random_model


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers, four query heads over two KV heads of width 8, 61 tokens."""
    values: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "rope": RopeConfig(theta=100.0),
        "bos_token_id": None,
        "eos_token_ids": (0,),
    }
    return ModelConfig(**(values | changes))


def random_params(config: ModelConfig, seed: int = 0) -> Any:
    """Parameters in the model's layout, float32; an untied head gives logits of a few units."""
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> Any:
        return jnp.asarray(rng.normal(0, shape[0] ** -0.5, shape), jnp.float32)

    def scale(*shape: int) -> Any:
        return jnp.asarray(rng.uniform(0.5, 1.5, shape), jnp.float32)

    dm, f = config.hidden_size, config.intermediate_size
    q, k = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "q": (dm, q), "k": (dm, k), "v": (dm, k), "o": (q, dm),
        "gate": (dm, f), "up": (dm, f), "down": (f, dm),
    }  # fmt: skip
    biased = (("q", "k", "v", "o") if config.attention_bias else ()) + (
        ("gate", "up", "down") if config.mlp_bias else ()
    )
    params: dict[str, Any] = {
        # Rows of unit variance, so that tokens differ and attention is not uniform.
        "embed": jnp.asarray(rng.normal(0, 1, (config.vocab_size, dm)), jnp.float32),
        "norm": scale(dm),
        "layers": [
            {"attn_norm": scale(dm), "mlp_norm": scale(dm)}
            | {name: weight(*shape) for name, shape in shapes.items()}
            | {f"{name}_bias": weight(shapes[name][1]) for name in biased}
            for _ in range(config.num_layers)
        ],
    }
    if not config.tie_word_embeddings:
        params["head"] = jnp.asarray(rng.normal(0, 0.4, (config.vocab_size, dm)), jnp.float32)
    return params


STOP = 256
"""The stop token of ``byte_tokenizer``."""


def byte_tokenizer() -> Any:
    """That of ``tiny-random`` with ``<user>`` and ``<model>``, its tokens in their characters' order."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return random_model.byte_tokenizer(("<user>", "<model>"), "<model>", alphabet)


def text_config(**changes: Any) -> ModelConfig:
    """``tiny_config`` for ``byte_tokenizer``, its logits wider than the tokenizer.

    The head is not tied: a random model with a tied one repeats its last token.
    """
    values = {"vocab_size": 290, "eos_token_ids": (STOP,), "tie_word_embeddings": False}
    return tiny_config(**(values | changes))
