"""Our families as trainable modules."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gkv_jax import CacheSpec, UserError
from gkv_jax.cache import ChunkAttend, init_cache
from gkv_jax.flax import CausalAttend, from_nnx, trainable
from gkv_jax.models.llama import Llama
from gkv_jax.models.protocol import AttentionLayer
from tests.gkv_jax.flax.models import LONGEST, Learned, made
from tests.gkv_jax.tiny import random_params, tiny_config

CONFIG = tiny_config()
PARAMS = random_params(CONFIG)


@dataclasses.dataclass(frozen=True)
class Everything(Llama):
    """A window in one layer; sinks, a soft cap and a scale in both."""

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        first, second = super().layers
        return dataclasses.replace(first, window=5), second

    def hidden(self, params: Any, tokens: jax.Array, attend: Any) -> jax.Array:
        sinks = jnp.linspace(-1.0, 1.0, 4)

        def more(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attend(layer, q, k, v, scale=0.5, soft_cap=3.0, sinks=sinks)

        return super().hidden(params, tokens, more)  # type: ignore[arg-type]


MODEL = Everything(CONFIG)
TEXT = np.random.default_rng(0).integers(0, 61, (2, 12)).astype(np.int32)


def loss(module: Any, tokens: jax.Array) -> jax.Array:
    logits = module(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@jax.jit
def cached_logits(params: Any, text: jax.Array) -> jax.Array:
    """``[L,V]`` of a text in one chunk, by the cache's attention."""
    spec = CacheSpec.full(16)
    cache = init_cache(spec, MODEL, 1, jnp.dtype("float32"))
    zero, length = jnp.int32(0), jnp.int32(text.size)
    attend = ChunkAttend(spec, MODEL, cache, zero, zero, length, text.size)
    return MODEL.logits(params, MODEL.hidden(params, text[None], attend))[0]


def test_logits_are_those_of_decoding_whichever_side_is_padded() -> None:
    module = trainable(MODEL, PARAMS)
    expected = np.asarray(cached_logits(PARAMS, TEXT[0]))
    mask = np.zeros((2, 15), bool)
    mask[0, 3:] = mask[1, :12] = True
    tokens = np.zeros((2, 15), np.int32)
    tokens[0, 3:] = tokens[1, :12] = TEXT[0]
    graphdef, state = nnx.split(module)
    run = jax.jit(lambda state, tokens, mask: nnx.merge(graphdef, state)(tokens, mask=mask))
    logits = np.asarray(run(state, tokens, mask))
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits[0, 3:], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logits[1, :12], expected, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_the_pure_function() -> None:
    def pure(params: Any, tokens: jax.Array) -> jax.Array:
        inputs = tokens[:, :-1]
        attend = CausalAttend(MODEL.layers, inputs.shape, remat=False)
        logits = MODEL.logits(params, MODEL.hidden(params, inputs, attend))
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1).mean()

    pure_with_gradient = jax.jit(jax.value_and_grad(pure))
    value, expected = pure_with_gradient(PARAMS, TEXT)
    module = trainable(MODEL, PARAMS)
    graphdef, state = nnx.split(module)

    @jax.jit
    def with_nnx(state: Any, tokens: jax.Array) -> Any:
        module = nnx.merge(graphdef, state)
        value, gradient = nnx.value_and_grad(loss)(module, tokens)
        nnx.update(module, gradient)  # so that it can be read as weights
        return value, module.params()

    own_value, gradient = with_nnx(state, TEXT)
    np.testing.assert_allclose(own_value, value, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), gradient, expected
    )
    # And that function's derivative along a direction, by central differences.
    direction = jax.tree.map(lambda leaf: jnp.sin(7.0 * leaf), PARAMS)
    ends = [
        pure_with_gradient(jax.tree.map(lambda p, d, s=step: p + s * d, PARAMS, direction), TEXT)[0]
        for step in (1e-2, -1e-2)
    ]
    along = sum(
        float(jnp.vdot(g, d))
        for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True)
    )
    assert along == pytest.approx(float(ends[0] - ends[1]) / 2e-2, rel=2e-2)


def test_an_optimiser_trains_it() -> None:
    module = trainable(MODEL, PARAMS)
    with jax.numpy_dtype_promotion("standard"):  # optax
        optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(module: Any, optimizer: Any, tokens: jax.Array) -> jax.Array:
            value, gradient = nnx.value_and_grad(loss)(module, tokens)
            optimizer.update(module, gradient)
            return value

        losses = [float(step(module, optimizer, jnp.asarray(TEXT))) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    params = module.params()
    assert jax.tree.structure(params) == jax.tree.structure(PARAMS)
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (params, PARAMS)), strict=True))


def test_refusals() -> None:
    with pytest.raises(UserError, match="int8, which cannot be trained"):
        trainable(Llama(CONFIG), jax.eval_shape(Llama(CONFIG).quantize, PARAMS))
    decoder, params = from_nnx(made(Learned), max_positions=LONGEST, check=False)
    with pytest.raises(UserError, match="train that"):
        trainable(decoder, params)
