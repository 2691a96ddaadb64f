"""The same weights in transformers, for side-by-side measurements."""

import json
import time
from typing import Any

from gkv_jax.models.transformer import Transformer
from gkv_jax.weights import Params, to_hf_state_dict


def llama_for_causal_lm(model: Transformer, params: Params) -> Any:
    """A float32 ``transformers.LlamaForCausalLM`` in eval mode, with the weights of a ``Llama``."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
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
        for name, array in to_hf_state_dict(model, params).items()
    }
    peer.load_state_dict(state)
    return peer.eval()


class GuidedTransformers:
    """transformers' ``generate`` with XGrammar's logits processor, as its users run it.

    Greedy, float32, the default cache.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """``model`` is a ``LlamaForCausalLM`` and ``tokenizer`` the one that belongs to it."""
        import xgrammar

        self._model, self.tokenizer = model, tokenizer
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=model.config.vocab_size
        )
        self._compiler = xgrammar.GrammarCompiler(info)

    def compile(self, schema: Any, **options: Any) -> Any:
        """The grammar of a JSON Schema; ``options`` are XGrammar's. Raises what a schema provokes."""
        return self._compiler.compile_json_schema(json.dumps(schema), **options)

    def generate(
        self, prompt: Any, max_tokens: int, grammar: Any = None
    ) -> tuple[list[list[int]], list[float]]:
        """Continue the prompts int64 ``[B,T]``, rows of equal length.

        Returns:
          The new tokens of each row, and when each step ended (``time.perf_counter``).
        """
        import torch
        import xgrammar

        stamps: list[float] = []

        def stamp(ids: Any, _scores: Any, **_: Any) -> Any:
            stamps.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        processors = [] if grammar is None else [xgrammar.contrib.hf.LogitsProcessor(grammar)]
        with torch.no_grad():
            output = self._model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_tokens,
                do_sample=False,
                logits_processor=processors,
                stopping_criteria=[stamp],
                pad_token_id=self.tokenizer.eos_token_id,
            )
        return output[:, prompt.shape[1] :].tolist(), stamps
