"""Models whose layers differ, and scaled rotary embeddings: logits equal transformers'."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax.cache import Cache, CacheSpec, init_cache
from gkv_jax.models import families
from gkv_jax.models.protocol import Attend, Decoder
from gkv_jax.models.rope_config import YarnScaling
from gkv_jax.prefill import prefill_chunk
from gkv_jax.rope import rotate
from gkv_jax.step import StepInputs, forward
from gkv_jax.weights.parameters import fill_params, placer
from tests.gkv_jax.models.mixed import WINDOW, gemma3, gpt_oss

TEXT = np.random.default_rng(0).integers(0, 256, 40).tolist()
assert len(TEXT) > 4 * WINDOW
SPEC = CacheSpec.full(64)


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


def their_logits(model: Any, tokens: list[int]) -> np.ndarray:
    import torch

    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].numpy()


@pytest.fixture(scope="module", params=["gemma", "gpt-oss"])
def mixed(request: pytest.FixtureRequest) -> tuple[Any, Any, np.ndarray]:
    """Decoder, parameters and the logits ``[T,V]`` that transformers gives for ``TEXT``."""
    make = {"gemma": gemma3, "gpt-oss": gpt_oss}[request.param]
    decoder, params, theirs = make(0)
    return decoder, params, their_logits(theirs, TEXT)


def close(actual: jax.Array, expected: np.ndarray) -> None:
    assert np.abs(expected).max() > 1  # the comparison is not between zeros
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=1e-4)


def test_logits_equal_transformers(mixed: tuple[Any, Any, np.ndarray]) -> None:
    decoder, params, expected = mixed
    assert {layer.window for layer in decoder.layers} == {WINDOW, None}
    close(dense_logits(params, decoder=decoder), expected)


@functools.partial(jax.jit, static_argnames="decoder", donate_argnames="cache")
def step(
    params: Any, cache: Cache, token: jax.Array, at: jax.Array, *, decoder: Decoder
) -> tuple[jax.Array, Cache]:
    """Logits ``[V]`` of one token in the first row, the second idle."""
    inputs = StepInputs(
        tokens=jnp.stack([token, jnp.zeros_like(token)])[:, None],
        n_drafts=jnp.zeros(2, jnp.int32),
        active=jnp.array([True, False]),
        logprobs=jnp.array(False),
        go=jnp.array(True),
        next_pos=jnp.stack([at, jnp.zeros_like(at)]),
    )
    hidden, cache, _ = forward(params, cache, inputs, model=decoder, spec=SPEC)
    return decoder.logits(params, hidden[0, 0]), cache


def test_the_cache_equals_transformers(mixed: tuple[Any, Any, np.ndarray]) -> None:
    """Local layers have rings of their window: a prompt in chunks, then tokens one by one."""
    decoder, params, expected = mixed
    cache = init_cache(SPEC, decoder, 2, jnp.float32)
    size, prompt = 11, 22  # neither divides the window
    for start in range(0, prompt, size):
        hidden, cache = prefill_chunk(
            params,
            cache,
            np.array(TEXT[start : start + size], np.int32),
            np.int32(0),
            np.int32(start),
            np.int32(size),
            model=decoder,
            spec=SPEC,
        )
        close(decoder.logits(params, hidden), expected[start : start + size])
    for at in range(prompt, len(TEXT)):
        logits, cache = step(params, cache, np.int32(TEXT[at]), np.int32(at), decoder=decoder)
        close(logits, expected[at])


def test_llama_with_yarn_equals_transformers() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=290,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
            },
            initializer_range=0.3,
        )
    ).eval()
    model = families.from_hf(theirs.config.to_dict() | {"architectures": None})
    assert isinstance(model.config.rope.scaling, YarnScaling)
    state = {name: value.numpy() for name, value in theirs.state_dict().items()}
    params = fill_params(model, state, "huggingface", placer("float32"))
    close(dense_logits(params, decoder=model), their_logits(theirs, TEXT))
