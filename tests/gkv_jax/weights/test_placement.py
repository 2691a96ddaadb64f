"""Rules that say where a leaf goes."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
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
    with pytest.raises(UserError, match=r"norm \[4\] does not divide into \[1, 1\] parts"):
        by_name(mesh, {"norm": P(None, ("data", "model"))})("norm", (4,))


def test_a_place_of_any_kind(mesh: Mesh) -> None:
    device = jax.devices()[0]
    single, named = SingleDeviceSharding(device), NamedSharding(mesh, P())
    assert place_of(None, "x", (1,)) == place_of(device, "x", (1,)) == single
    assert place_of(named, "x", (1,)) == named
    assert place_of(lambda name, shape: device, "x", (1,)) == single
