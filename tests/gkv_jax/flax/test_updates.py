"""Live weights: what a training script hands to ``Engine.update_params``."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gkv_jax import Sampling, UserError
from gkv_jax.flax import from_nnx
from tests.gkv_jax.flax.models import LONGEST, Learned, Linen, made, made_linen

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
    engine = served("learned").engine
    for wrong in ({"a": jnp.ones(3)}, [1, 2], "weights", object()):
        with pytest.raises(UserError, match="differ in structure"):
            engine.update_params(wrong)


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
