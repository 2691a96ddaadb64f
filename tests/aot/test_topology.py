"""The harness: a decode-shaped loop with two host callbacks compiles, and its schedule reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.aot.hlo import Program
from tests.aot.topology import GENERATIONS, Generation, abstract, compile_for, tpu_devices

pytestmark = pytest.mark.aot

BATCH, FEATURES = 8, 256


def _submit(tokens):
    return np.asarray(tokens)


def _collect(ready):
    return np.zeros((BATCH, FEATURES), np.float32)


def _decode(weights, tokens):
    """Tokens go to the host, features go through a matmul, and the host adds to what comes out."""

    def step(carry):
        i, tokens = carry
        tokens = io_callback(_submit, jax.ShapeDtypeStruct((BATCH,), jnp.int32), tokens)
        hidden = jnp.tanh(weights[tokens] @ weights)
        bias = io_callback(
            _collect, jax.ShapeDtypeStruct((BATCH, FEATURES), jnp.float32), hidden[0, 0]
        )
        return i + 1, jnp.argmax(hidden + bias, axis=-1).astype(jnp.int32)

    return jax.lax.while_loop(lambda carry: carry[0] < 10, step, (jnp.int32(0), tokens))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_loop_with_callbacks_compiles_and_shows_its_schedule(generation: Generation):
    compiled = compile_for(
        generation,
        _decode,
        jax.ShapeDtypeStruct((FEATURES, FEATURES), jnp.float32),
        jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    )
    program = Program.of(compiled)
    assert program.is_scheduled
    (body,) = program.while_bodies()
    transfers = [i for i in body if i.opcode in ("send", "recv")]
    assert [i.opcode for i in transfers] == ["send", "recv", "send", "recv"]
    assert all("is_host_transfer=true" in i.rest for i in transfers)
    assert [i.arrays[0].shape for i in transfers] == [(BATCH,), (BATCH,), (), (BATCH, FEATURES)]
    submitted, collecting = body.index(transfers[1]), body.index(transfers[2])
    between = [i.rest for i in body[submitted:collecting] if i.opcode == "fusion"]
    assert any("dot_general" in rest or "tanh" in rest for rest in between)


def test_four_chips_share_a_matmul():
    mesh = Mesh(np.asarray(tpu_devices("v5e")), ("model",))
    columns = NamedSharding(mesh, PartitionSpec(None, "model"))
    replicated = NamedSharding(mesh, PartitionSpec())
    x = abstract(jax.ShapeDtypeStruct((BATCH, FEATURES), jnp.float32), replicated)
    w = abstract(jax.ShapeDtypeStruct((FEATURES, 4 * FEATURES), jnp.float32), columns)
    program = Program.of(jax.jit(jnp.matmul).lower(x, w).compile())
    assert program.buffers[-1].arrays[0].shape == (BATCH, FEATURES)


def test_hlo_reader_tells_buffers_from_fusion_internals():
    compiled = compile_for(
        "v5e",
        lambda x: jnp.sum(jnp.exp(x) > 1, axis=-1),
        jax.ShapeDtypeStruct((8, 512), jnp.float32),
    )
    program = Program.of(compiled)
    inside = [a for body in program.computations.values() for i in body for a in i.arrays]
    assert any(a.shape == (8, 512) and a.dtype == "pred" for a in inside)
    assert not any(a.dtype == "pred" for i in program.buffers for a in i.arrays)
