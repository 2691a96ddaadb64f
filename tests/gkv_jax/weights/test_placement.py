"""Rules that say where a leaf goes."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from gkv_jax import UserError
from gkv_jax.weights.placement import by_name, place_of


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def test_the_first_pattern_decides(mesh: Mesh) -> None:
    rule = by_name(mesh, {"layers.*.[qk]": P(None, "model"), "layers.*": P("data")})
    assert rule("layers.3.q", (4, 4)) == NamedSharding(mesh, P(None, "model"))
    assert rule("layers.3.o", (4, 4)) == NamedSharding(mesh, P("data"))
    assert rule("norm", (4,)) == NamedSharding(mesh, P())


def test_faults_are_named(mesh: Mesh) -> None:
    with pytest.raises(UserError, match=r"layers.\*: the mesh has no axis tp; its axes: data, mod"):
        by_name(mesh, {"layers.*": P(None, "tp")})
    with pytest.raises(UserError, match=r"layers.\*: the partition has an axis of the mesh twice"):
        by_name(mesh, {"layers.*": P("data", ("model", "data"))})
    rule = by_name(
        AbstractMesh((2, 3), ("data", "model")),
        {"norm": P(None, "model"), "*": P(("data", "model"))},
    )
    with pytest.raises(UserError, match=r"norm \[4\] has fewer dimensions .*, which has 2"):
        rule("norm", (4,))
    with pytest.raises(
        UserError, match=r"\*: layers.0.q \[8, 6\] does not divide into \[6\] parts"
    ):
        rule("layers.0.q", (8, 6))
    assert rule("layers.0.k", (12, 5)).spec == P(("data", "model"))


def test_a_place_of_any_kind(mesh: Mesh) -> None:
    device = jax.devices()[0]
    single, named = SingleDeviceSharding(device), NamedSharding(mesh, P())
    assert place_of(None, "x", (1,)) == place_of(device, "x", (1,)) == single
    assert place_of(named, "x", (1,)) == named
    assert place_of(lambda name, shape: device, "x", (1,)) == single
