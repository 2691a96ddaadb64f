"""Gemma 3 and gpt-oss, tiny: families whose layers differ, with the same random weights in transformers.

Gemma 3 has five local layers to one global, each kind with its own rotary base; gpt-oss has local and
full layers in turn, learned sinks, YaRN and a mixture of experts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gkv_jax.models import families
from gkv_jax.models.protocol import Attend, Decoder, Params
from gkv_jax.rope import rotate
from gkv_jax.weights.parameters import fill_params, placer

WINDOW = 8
"""Positions that a query of a local layer sees, itself included."""
VOCAB = 290
"""Wide enough for ``tests.gkv_jax.tiny.byte_tokenizer``."""
TEXT = np.random.default_rng(0).integers(0, 256, 40).tolist()
"""Several windows of tokens."""
_WIDTH = 32
_HEADS, _KV_HEADS = 4, 2


def gemma3(seed: int) -> tuple[Decoder, Params, Any]:
    """Seven layers, the sixth global: decoder, float32 parameters, ``Gemma3ForCausalLM``."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    bases = {"sliding_attention": 100.0, "full_attention": 10_000.0}
    config = Gemma3TextConfig(
        **_shared_options(),
        num_hidden_layers=7,
        head_dim=16,
        query_pre_attn_scalar=24,
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in bases.items()
        },
    )
    return _random_pair(Gemma3ForCausalLM, config, seed)


def gpt_oss(seed: int) -> tuple[Decoder, Params, Any]:
    """Four layers, the even ones local: decoder, float32 parameters, ``GptOssForCausalLM``."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **_shared_options(),
        num_hidden_layers=4,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=2.0,  # low enough to be met
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    )
    return _random_pair(GptOssForCausalLM, config, seed)


def _shared_options() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": _WIDTH,
        "intermediate_size": 48,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "sliding_window": WINDOW,
        "max_position_embeddings": 256,
        # Larger than the default, so that attention is not nearly uniform.
        "initializer_range": 0.3,
        "eos_token_id": 256,
        "bos_token_id": None,
        "pad_token_id": None,
    }


def _random_pair(kind: Any, config: Any, seed: int) -> tuple[Decoder, Params, Any]:
    """A transformers model with random weights, and ours with the same."""
    import torch

    torch.manual_seed(seed)
    theirs = kind(config).eval()
    for name, parameter in theirs.named_parameters():  # biases and norms are not 0 and 1 in life
        if parameter.ndim == 1 or name.endswith("bias"):
            ones = "norm" in name and "gemma" not in config.model_type  # Gemma's are offsets to 1
            torch.nn.init.normal_(parameter, mean=float(ones), std=0.2)
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=1.0)
    state = {name: value.numpy() for name, value in theirs.state_dict().items()}
    model = families.from_hf(config.to_dict())
    return model, fill_params(model, state, "huggingface", placer("float32")), theirs


def dense_attend(decoder: Decoder, tokens: int) -> Attend:
    """Attention over a whole text of ``tokens``, each layer with its rope and its window."""
    at = np.arange(tokens)
    distance = at[:, None] - at[None, :]

    def attend(
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        assert soft_cap is None  # neither model has one
        rope, window = decoder.layers[layer].rope, decoder.layers[layer].window
        angles = rope.angles(jnp.asarray(at, jnp.int32)[None, :, None])
        group = q.shape[2] // k.shape[2]
        q, k = rotate(q, rope.for_queries(angles)), rotate(k, angles)
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.shape[-1] ** -0.5)
        visible = (distance >= 0) & (distance < (window or tokens))
        scores = jnp.where(visible[None, None], scores, -jnp.inf)
        if sinks is not None:  # one more key, without a value
            sink = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
            scores = jnp.concatenate([scores, sink], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :tokens]
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    return attend


@functools.partial(jax.jit, static_argnames="decoder")
def dense_logits(params: Any, *, decoder: Decoder) -> jax.Array:
    """Logits ``[T,V]`` of ``TEXT``, without a cache."""
    tokens = jnp.array([TEXT], jnp.int32)
    hidden = decoder.hidden(params, tokens, dense_attend(decoder, len(TEXT)))
    return decoder.logits(params, hidden[0])
