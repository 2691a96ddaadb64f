"""Logits and greedy tokens equal transformers', on random variants and on trained weights."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peer import llama_for_causal_lm
from gkv_jax import CacheSpec, Engine, Sampling
from gkv_jax.cache import init_cache
from gkv_jax.models import families
from gkv_jax.models.transformer import Transformer
from gkv_jax.prefill import chunk_hidden
from gkv_jax.weights.huggingface import SafetensorsCheckpoint, read_model
from gkv_jax.weights.parameters import fill_params, placer
from gkv_jax.weights.registry import LoadedModel
from tests.gkv_jax.tiny import byte_tokenizer

SPEC = CacheSpec.full(160)

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True, "tie_word_embeddings": True},
    "one kv head": {"num_key_value_heads": 1},
    "no grouping": {"num_key_value_heads": 4},
    "own head width": {"head_dim": 16},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
}


def reference(changes: dict[str, Any]) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "vocab_size": 290,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            # Larger than the default, so that attention is not nearly uniform.
            "initializer_range": 0.3,
            "eos_token_id": 256,
            "bos_token_id": None,
            "pad_token_id": 256,
        }
        | changes
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():  # biases and norms are not 0 and 1 in life
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return model


def our_logits(model: Transformer, params: Any, tokens: list[int]) -> np.ndarray:
    """Logits ``[T,V]`` of a prompt through the full cache."""
    hidden, _ = chunk_hidden(
        params,
        init_cache(SPEC, model, 1, jnp.float32),
        np.asarray(tokens, np.int32),
        np.int32(0),
        np.int32(0),
        np.int32(len(tokens)),
        model=model,
        spec=SPEC,
    )
    return np.asarray(model.logits(params, hidden))


def their_logits(model: LlamaForCausalLM, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].numpy()


def their_greedy(model: LlamaForCausalLM, tokens: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
        )
    eos = model.generation_config.eos_token_id
    return [t for t in out[0, len(tokens) :].tolist() if t not in np.atleast_1d(eos)]


@pytest.mark.parametrize("name", VARIANTS)
def test_random_variant_equals_transformers(name: str, tmp_path: Path) -> None:
    theirs = reference(VARIANTS[name])
    theirs.save_pretrained(tmp_path)
    model = read_model(tmp_path)
    checkpoint = SafetensorsCheckpoint.open(tmp_path)
    params = fill_params(model, checkpoint, "huggingface", placer("float32"))

    tokens = np.random.default_rng(0).integers(0, 256, 70).tolist()
    np.testing.assert_allclose(
        our_logits(model, params, tokens), their_logits(theirs, tokens), rtol=0, atol=1e-4
    )
    with Engine(model, params, byte_tokenizer(), cache=SPEC, slots=1) as engine:
        prompt = "The quick brown fox"
        (result,) = engine.generate(prompt, sampling=Sampling(max_tokens=32))
    assert list(result.tokens) == their_greedy(theirs, engine.tokenizer.encode(prompt), 32)


@pytest.mark.model
def test_smollm2_equals_transformers(smollm2: LoadedModel, smollm2_params: Any) -> None:
    """Same weights in float32: logits within 1e-3 on three prompts, 64 greedy tokens equal."""
    config, model = smollm2.config, smollm2.model
    theirs = llama_for_causal_lm(model, smollm2.params)

    prompts = [
        "The capital of Portugal is Lisbon, a city on seven hills. The capital of France is",
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
        "Once upon a time, in 1834, there lived an old woman who had",
    ]
    spec = CacheSpec(sinks=4, window=252)
    for prompt in prompts:
        tokens = smollm2.tokenizer.encode(prompt)
        ours, expected = our_logits(model, smollm2_params, tokens), their_logits(theirs, tokens)
        assert np.abs(ours - expected).max() < 1e-3
    with Engine(
        model,
        smollm2_params,
        smollm2.tokenizer,
        cache=spec,
        slots=4,
        stop_token_ids=config.eos_token_ids,
    ) as engine:
        results = engine.generate(prompts, sampling=Sampling(max_tokens=64))
    for prompt, result in zip(prompts, results, strict=True):
        # What they choose after each beginning of the text: in one pass what greedy search does in 64.
        tokens = smollm2.tokenizer.encode(prompt)
        chosen = their_logits(theirs, [*tokens, *result.tokens]).argmax(axis=-1)
        assert chosen[len(tokens) - 1 : -1].tolist() == list(result.tokens)
        if len(result.tokens) < 64:
            assert chosen[-1] in config.eos_token_ids
    assert max(len(result.tokens) for result in results) == 64


def test_bfloat16_weights_give_nearly_the_same_distribution() -> None:
    """Everything that must be float32 inside is: a bfloat16 model is off by its rounding only."""
    theirs = reference({})
    model = families.from_hf(theirs.config.to_dict())
    state = {k: v.numpy() for k, v in theirs.state_dict().items()}
    params = fill_params(model, state, "huggingface", placer("bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    tokens = np.random.default_rng(0).integers(0, 256, 70).tolist()
    ours, expected = our_logits(model, params, tokens), their_logits(theirs, tokens)
    assert ours.dtype == np.float32
    assert np.abs(ours - expected).mean() < 0.02 * np.abs(expected).mean() + 0.05
