"""Live weights: what a training script hands to ``Engine.update_params``."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from gkv_jax import CacheSpec, Engine, Sampling, UserError, scheduler
from gkv_jax.flax import from_linen, from_nnx, trainable
from gkv_jax.models.llama import Llama
from gkv_jax.placement import difference
from tests.gkv_jax.flax.conftest import TOKENIZER
from tests.gkv_jax.flax.models import LONGEST, VOCAB, WIDTH, Learned, Linen, made, made_linen
from tests.gkv_jax.tiny import random_params, tiny_config

SAMPLING = Sampling(max_tokens=6)


def say(engine: Any) -> tuple[int, ...]:
    (result,) = engine.generate("a", sampling=SAMPLING)
    assert result.error is None
    return result.tokens


def test_weights_in_every_form_without_a_compile(served: Any, compiles: list[str]) -> None:
    each = served("learned")
    before = say(each.engine)
    other = made(Learned, seed=1, dropout=0.1)
    again, _ = from_nnx(
        other, max_positions=LONGEST, method="states", head=each.decoder.head_of, check=False
    )
    assert again == each.decoder
    assert hash(again) == hash(each.decoder)
    params = each.decoder.params_of(other)
    forms = {
        "module": other,
        "state": nnx.state(other),
        "params": params,
        "committed": jax.device_put(params, jax.devices()[0]),
        "NumPy": jax.tree.map(np.asarray, params),
    }
    said = {}
    compiles.clear()
    for name, form in forms.items():
        each.engine.update_params(each.params)
        assert say(each.engine) == before
        each.engine.update_params(form)
        said[name] = say(each.engine)
    assert compiles == []
    assert len(set(said.values())) == 1
    assert said["module"] != before
    weak = jax.tree.map(lambda leaf: jax.lax.full_like(leaf, 0.0) + leaf, params)
    each.engine.update_params(weak)
    assert say(each.engine) == said["module"]
    each.engine.update_params(each.params)


def test_no_copies(served: Any) -> None:
    each = served("learned")
    each.engine.update_params(each.model)
    ours = jax.tree.leaves(each.engine._scheduler.params)
    theirs = jax.tree.leaves(each.decoder.params_of(each.model))
    pointers = [[leaf.unsafe_buffer_pointer() for leaf in leaves] for leaves in (ours, theirs)]
    assert pointers[0] == pointers[1]


def test_linen_variables(served: Any) -> None:
    each = served("linen")
    before = say(each.engine)
    other = made_linen(Linen(), seed=1, train=False)
    each.engine.update_params(other)
    after = say(each.engine)
    assert after != before
    each.engine.update_params(each.variables)
    assert say(each.engine) == before
    each.engine.update_params(other["params"])  # TrainState.params
    assert say(each.engine) == after
    each.engine.update_params(each.variables)


def test_other_models_are_refused(served: Any) -> None:
    """By the first array that differs."""
    each = served("learned")
    kernel = each.params["out"]["kernel"]

    def with_kernel(leaf: Any) -> dict[str, Any]:
        return {**each.params, "out": {"kernel": leaf}}

    for wrong, message in (
        ({"a": jnp.ones(3)}, r"\['blocks'\].* is missing"),
        ([1, 2], "is missing"),
        ("weights", "is missing"),
        (object(), "is missing"),
        ({**each.params, "more": kernel}, r"\['more'\] is float32 \[32, 290\], and missing"),
        (
            with_kernel(kernel[:5]),
            r"\['out'\]\['kernel'\] is float32 \[5, 290\], and float32 \[32, 290\]",
        ),
        (with_kernel(kernel.astype(jnp.bfloat16)), "is bfloat16"),
        (with_kernel([kernel]), r"\['kernel'\] is missing"),
    ):
        with pytest.raises(UserError, match=f"differ from the engine's: .*{message}"):
            each.engine.update_params(wrong)


def test_a_trainable_module_is_taken_as_it_is() -> None:
    config = tiny_config()
    model, params = Llama(config), random_params(config)
    module = trainable(model, random_params(config, seed=1))
    with Engine(model, params, TOKENIZER, cache=CacheSpec(sinks=0, window=16)) as engine:
        engine.update_params(module)
        used = engine._scheduler.params
        jax.tree.map(np.testing.assert_array_equal, used, module.params())
        assert any(map(np.any, jax.tree.leaves(jax.tree.map(jnp.not_equal, used, params))))
        with pytest.raises(UserError, match=r"module\.params\(\)"):
            engine.update_params(nnx.state(module))


def test_what_a_model_has_sown_is_no_weight(served: Any) -> None:
    each = served("learned")
    for intermediate in (nnx.Intermediate, nnx.Perturbation):
        other = made(Learned, dropout=0.1)
        other.blocks[0].norm1.sown = intermediate((jnp.ones(2), jnp.ones(2)))
        for form in (other, nnx.state(other)):
            each.engine.update_params(form)
        from_nnx(other, max_positions=LONGEST, check=False)


class Boxed(linen.Module):
    """Weights in the boxes that say where they lie."""

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        init = linen.with_partitioning(linen.initializers.normal(), (None, "model"))
        x = linen.Embed(VOCAB, WIDTH, embedding_init=init)(tokens)
        x = linen.MultiHeadDotProductAttention(4)(x, mask=linen.make_causal_mask(tokens))
        return linen.Dense(VOCAB)(x)


def test_boxed_and_unboxed_variables_are_the_same() -> None:
    variables = made_linen(Boxed())
    assert any(map(_is_box, jax.tree.leaves(variables, is_leaf=_is_box)))
    given: dict[str, Any] = {"max_positions": LONGEST, "check": False}
    decoder, params = from_linen(Boxed(), variables, **given)
    plain = linen.meta.unbox(variables)
    for form in (variables, plain, plain["params"]):
        assert difference(decoder.params_of(form), params) is None


def _is_box(node: Any) -> bool:
    return isinstance(node, linen.Partitioned)


def test_donated_weights(served: Any) -> None:
    """A training step takes the weights away; requests say so, until there are new ones."""
    each = served("linen")
    before = say(each.engine)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(variables: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * 1.0, variables)

    mine = jax.tree.map(jnp.copy, each.variables)
    each.engine.update_params(mine)
    after = step(mine)
    assert jax.tree.leaves(mine)[0].is_deleted()
    for prompt in ("a", "a longer prompt"):
        (result,) = each.engine.generate(prompt, sampling=SAMPLING)
        assert isinstance(result.error, UserError)
        assert "donate_argnums" in str(result.error)
        assert "update_params" in str(result.error)
    with pytest.raises(UserError, match="have been deleted"):
        each.engine.update_params(mine)
    assert each.engine.failure is None
    each.engine.update_params(after)
    assert say(each.engine) == before
    each.engine.update_params(each.variables)


@pytest.mark.parametrize("program", ["reading", "device_loop"])
def test_weights_donated_on_the_way(
    program: str, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has new ones, but what is running began with the old."""
    each = served("linen")
    before = say(each.engine)
    real = getattr(scheduler, program)

    def donated(params: Any, *args: Any, **options: Any) -> Any:
        each.engine.update_params(each.variables)
        for leaf in jax.tree.leaves(params):
            leaf.delete()
        return real(params, *args, **options)

    each.engine.update_params(jax.tree.map(jnp.copy, each.variables))
    with monkeypatch.context() as patched:
        patched.setattr(scheduler, program, donated)
        (result,) = each.engine.generate("two tokens", sampling=SAMPLING)
    assert isinstance(result.error, UserError)
    assert "donate_argnums" in str(result.error)
    assert say(each.engine) == before
