"""Generation from users' own Flax decoders, against the models run without a cache."""

import concurrent.futures
import contextlib
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gkv_jax import CacheSpec, Guide, Sampling, UserError
from gkv_jax.cache import longest_text
from gkv_jax.compat import current_mesh
from gkv_jax.evaluate.perplexity import streaming_nll
from gkv_jax.flax import CausalAttend, from_nnx
from gkv_jax.placement import Surroundings, difference
from tests.gkv_jax.flax.conftest import MESH, ROTATED, TOKENIZER, capped
from tests.gkv_jax.flax.models import LONGEST, Learned, made, made_mixed

KINDS = ["learned", "rotated", "grouped", "linen", "mixed"]


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
        if each.kind in ("grouped", "mixed"):
            return model(tokens, CausalAttend(each.decoder.layers, tokens.shape))
        return model(tokens)

    def own(tokens: jax.Array) -> jax.Array:
        with jax.set_mesh(MESH) if each.kind == "mixed" else contextlib.nullcontext():
            return run(state, tokens)

    return own


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_the_model_without_a_cache(kind: str, served: Any) -> None:
    if kind == "mixed" and jax.__version_info__ < (0, 8):
        pytest.skip("XLA multiplied no bfloat16 on CPUs")
    each = served(kind)
    prompts = ["a prompt of more than thirty-two tokens, in two chunks", "x"]
    sampling = Sampling(max_tokens=12, lookup=each.engine.spec.max_drafts > 0)
    results = each.engine.generate(prompts, sampling=sampling)
    run = own_logits(each)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.error is None
        text = np.zeros((1, LONGEST), np.int32)
        tokens = TOKENIZER.encode(prompt)
        for token in result.tokens:
            text[0, : len(tokens)] = tokens
            logits = np.asarray(run(text)[0, len(tokens) - 1])
            # As good as the best: sums are in another order here.
            assert logits[token] >= logits.max() - (0.05 if each.kind == "mixed" else 1e-3)
            tokens.append(token)
        assert len(set(result.tokens)) > 1


def test_what_is_known_of_the_models(served: Any) -> None:
    windows = [layer.window for layer in served("rotated").decoder.layers]
    assert windows == [7, None]
    assert all(layer.rope is None for layer in served("linen").decoder.layers)
    grouped = served("grouped").decoder
    assert (grouped.num_heads, grouped.num_kv_heads, grouped.head_dim) == (4, 2, 8)
    assert (grouped.vocab_size, grouped.num_layers) == (290, 2)
    mixed = served("mixed")
    assert {leaf.dtype for leaf in jax.tree.leaves(mixed.engine._scheduler.params)} == {
        jnp.dtype("float32")
    }
    assert mixed.engine.dtype == jnp.bfloat16
    assert mixed.engine._scheduler.cache_shapes().layers[0].k.data.dtype == jnp.bfloat16
    assert difference(mixed.decoder.params_of(mixed.model), mixed.engine._scheduler.params) is None


def test_texts_end_where_the_models_own_code_knows_no_further_positions(served: Any) -> None:
    """Also where the cache moves keys: a table of positions has an end."""
    spec = CacheSpec(sinks=2, window=14)
    assert longest_text(spec, served("mixed").decoder) == math.inf
    with jax.set_mesh(MESH):
        decoder, _ = from_nnx(
            made_mixed(learned=True),
            max_positions=LONGEST,
            layers=[ROTATED],
            method="states",
            head=capped,
            check=False,
        )
    assert longest_text(spec, decoder) == LONGEST
    decoder, _ = from_nnx(made(Learned), max_positions=LONGEST, layers=[ROTATED], check=False)
    assert longest_text(spec, decoder) == LONGEST


def test_the_engine_thread_has_the_settings_of_the_one_that_made_it() -> None:
    def seen() -> tuple[Any, ...]:
        return current_mesh(), *(getattr(jax.config, name) for name in settings)

    settings = "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_default_device"
    device = jax.devices()[0]
    with (
        jax.set_mesh(MESH),
        jax.default_matmul_precision("highest"),
        jax.numpy_dtype_promotion("standard"),
        jax.default_device(device),
    ):
        surroundings = Surroundings()

    def within() -> tuple[Any, ...]:
        with surroundings.entered():
            return seen()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        before = thread.submit(seen).result()
        assert thread.submit(within).result() == (MESH, "highest", "standard", device)
        assert thread.submit(seen).result() == before
    assert before[0] is None


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
