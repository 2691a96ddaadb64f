"""Models with int8 weights: nearly the same logits, and decoding that is as exact as with others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax import CacheSpec, Engine, Guide, Sampling, UserError
from gkv_jax.cache import init_cache
from gkv_jax.models.llama import Llama
from gkv_jax.models.protocol import Params
from gkv_jax.prefill import chunk_hidden
from gkv_jax.sampling import greedy_rows
from pallas_kernels.int8_matmul import Int8Matrix
from pallas_kernels.masked_head import masked_head, project
from pallas_kernels.masked_sample import masked_sample
from tests.gkv_jax.tiny import byte_tokenizer, random_params, text_config, tiny_config

SPEC = CacheSpec.full(32)


def logits(model: Llama, params: Params, tokens: np.ndarray) -> np.ndarray:
    cache = init_cache(SPEC, model, 1, jnp.dtype(jnp.float32))
    start, length = np.int32(0), np.int32(len(tokens))
    hidden, _ = chunk_hidden(
        params, cache, tokens, np.int32(0), start, length, model=model, spec=SPEC
    )
    return np.asarray(model.logits(params, hidden))


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}]
)
def test_logits_are_nearly_those_of_the_weights(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    model, params = Llama(config), random_params(config)
    rounded = jax.jit(model.quantize)(params)
    layer = rounded["layers"][0]
    assert {n for n, leaf in layer.items() if isinstance(leaf, Int8Matrix)} == {
        "qkv", "o", "gate_up", "down"
    }  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 24).astype(np.int32)
    exact, approximate = logits(model, params, tokens), logits(model, rounded, tokens)
    error = np.linalg.norm(approximate - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.03
    assert (approximate.argmax(-1) == exact.argmax(-1)).mean() > 0.9


def test_the_head_in_tiles_samples_what_the_whole_head_does() -> None:
    rng = np.random.default_rng(1)
    config = tiny_config(vocab_size=4096)
    model = Llama(config)
    head = model.head(model.quantize(random_params(config)))
    hidden = jnp.asarray(rng.normal(0, 1, (3, 2, config.hidden_size)), jnp.float32)
    words = np.zeros((3, 2, 128), np.int32)
    words[..., rng.integers(0, 128, 9)] = -1  # a few tiles
    rows = greedy_rows(3)._replace(temperature=np.array([0, 1, 0.7], np.float32))
    operands = (words, np.ones((3, 2), np.int32), np.arange(6, dtype=np.int32).reshape(3, 2), rows)
    in_tiles = jax.jit(masked_head)(hidden, head, *operands)
    assert in_tiles.rows_read < 4096
    np.testing.assert_array_equal(in_tiles.tokens, masked_sample(project(hidden, head), *operands))


def test_drafts_change_nothing() -> None:
    config = text_config()
    model = Llama(config)
    params = jax.jit(model.quantize)(random_params(config))
    spec = CacheSpec(sinks=4, window=60, max_drafts=3, prefill_chunk=32)
    with Engine(model, params, byte_tokenizer(), cache=spec, slots=2, verify="always") as engine:
        guides = [Guide.regex("(abc)+d"), Guide.json_schema({"const": "a constant"}), None]
        outputs = []
        for options in ({"jump": "off"}, {"lookup": True}):
            sampling = Sampling(max_tokens=30, temperature=0.8, seed=2, **options)
            results = engine.generate(["abcabc"] * 3, guide=guides, sampling=sampling)
            outputs.append([(r.tokens, r.text, r.error) for r in results])
        assert outputs[0] == outputs[1]
        assert results[0].stats["drafts_accepted"] > 0


def test_an_unknown_way_to_round() -> None:
    unknown: Any = "int4"
    with pytest.raises(UserError, match=r"quantize is 'int4'; choose from \('int8',\)"):
        Engine.from_pretrained("smollm2-135m-instruct", quantize=unknown)
