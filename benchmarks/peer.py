"""The same weights in transformers, for side-by-side measurements."""

from typing import Any

from gkv_jax.models.config import ModelConfig
from gkv_jax.weights import Params, to_hf_state_dict


def llama_for_causal_lm(config: ModelConfig, params: Params) -> Any:
    """A float32 ``transformers.LlamaForCausalLM`` in eval mode.

    ``params`` is a checkpoint tree (matrices ``[out, in]``), as ``gkv_jax.weights`` loads it.
    """
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if config.rope.scaling is not None:
        raise ValueError("a model with scaled rotary embeddings is not compared here")
    peer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=config.tie_word_embeddings,
            attention_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            bos_token_id=config.bos_token_id,
            eos_token_id=list(config.eos_token_ids),
        )
    )
    state = {
        name: torch.from_numpy(np.array(array, np.float32))
        for name, array in to_hf_state_dict(config, params).items()
    }
    peer.load_state_dict(state)
    return peer.eval()
