"""Generation from users' own Flax decoders, against the models run without a cache."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gkv_jax import CacheSpec, Guide, Sampling, UserError
from gkv_jax.evaluate.perplexity import streaming_nll
from gkv_jax.flax import CausalAttend
from tests.gkv_jax.flax.conftest import TOKENIZER
from tests.gkv_jax.flax.models import LONGEST

KINDS = ["learned", "rotated", "grouped", "linen"]


def own_logits(each: Any) -> Any:
    """The user's model as it is: from tokens ``[1,L]`` to logits, compiled."""
    if each.kind == "linen":
        return jax.jit(lambda t: each.model.apply(each.variables, t, train=False))
    graphdef, state = nnx.split(each.model)

    @jax.jit
    def run(state: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)
        model.eval()
        if each.kind == "rotated":
            return model(tokens, where=jnp.arange(tokens.shape[1])[None])
        if each.kind == "grouped":
            return model(tokens, CausalAttend(each.decoder.layers, tokens.shape))
        return model(tokens)

    return lambda tokens: run(state, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_the_model_without_a_cache(kind: str, served: Any) -> None:
    each = served(kind)
    prompts = ["a prompt of more than thirty-two tokens, in two chunks", "x"]
    results = each.engine.generate(prompts, sampling=Sampling(max_tokens=12, lookup=True))
    run = own_logits(each)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.error is None
        text = np.zeros((1, LONGEST), np.int32)
        tokens = TOKENIZER.encode(prompt)
        for token in result.tokens:
            text[0, : len(tokens)] = tokens
            logits = np.asarray(run(text)[0, len(tokens) - 1])
            # As good as the best: sums are in another order here.
            assert logits[token] >= logits.max() - 1e-3
            tokens.append(token)
        assert len(set(result.tokens)) > 1


def test_what_is_known_of_the_models(served: Any) -> None:
    windows = [layer.window for layer in served("rotated").decoder.layers]
    assert windows == [7, None]
    assert all(layer.rope is None for layer in served("linen").decoder.layers)
    grouped = served("grouped").decoder
    assert (grouped.num_heads, grouped.num_kv_heads, grouped.head_dim) == (4, 2, 8)
    assert (grouped.vocab_size, grouped.num_layers) == (290, 2)


def test_a_guide_is_obeyed(served: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}
    guide = Guide.json_schema({**schema, "additionalProperties": False})
    for kind in ("learned", "linen"):  # one gives hidden states, one logits
        (result,) = served(kind).engine.generate(
            "A number.", guide=guide, sampling=Sampling(max_tokens=60)
        )
        assert json.loads(result.text)["n"] in (1, 22)


def test_a_bounded_cache_says_what_the_model_says_of_its_window(served: Any) -> None:
    """The window of the cache as the window of the masks: sinks and rotations stay where they are."""
    each = served("grouped")  # one layer sees through the other: a window shows in two
    text = np.random.default_rng(0).integers(1, 290, 60)
    full = streaming_nll(each.decoder, each.params, text, CacheSpec.full(64), chunk=16)
    bounded = CacheSpec(sinks=2, window=8)
    nll = streaming_nll(each.decoder, each.params, text, bounded, chunk=16)
    np.testing.assert_allclose(nll[:9], full[:9], rtol=1e-4, atol=1e-4)
    assert np.abs(nll[20:] - full[20:]).max() > 1e-2
    with pytest.raises(UserError, match="made for 96 of them"):
        streaming_nll(each.decoder, each.params, np.tile(text, 2), bounded)


def test_positions_end_with_the_model(served: Any) -> None:
    engine = served("linen").engine
    (result,) = engine.generate([[5] * 90], sampling=Sampling(max_tokens=50))
    assert result.finish_reason == "length"
    assert len(result.tokens) <= LONGEST - 90 + 1
    (result,) = engine.generate([[5] * 97])
    assert "made for 96 of them" in str(result.error)


def test_the_users_model_stays_as_it_is(served: Any) -> None:
    each = served("learned")
    attention = each.model.blocks[0].attention
    assert attention.attention_fn is nnx.dot_product_attention
    assert not attention.deterministic
    assert isinstance(each.decoder.params_of(each.model), dict)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "h2o", "kept": 8, "interval": 4, "prefill": "chunks", "dtype": "int8"},
        {"policy": "quest", "budget": 48, "page": 8, "window": 62},
    ],
    ids=lambda options: options["policy"],
)
def test_policies_take_keys_as_they_come(options: dict[str, Any], served: Any) -> None:
    """While nothing is evicted, they say what the full cache says."""
    each = served("rotated")
    text = np.random.default_rng(1).integers(1, 290, 40)
    full = streaming_nll(each.decoder, each.params, text, CacheSpec.full(64), chunk=8)
    spec = CacheSpec(**{"sinks": 2, "window": 48} | options)
    nll = streaming_nll(each.decoder, each.params, text, spec, chunk=8)
    np.testing.assert_allclose(nll, full, rtol=0.1, atol=0.1)
