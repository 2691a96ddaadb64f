"""Quest with pages on the device and on the host, compiled for TPUs: what lies where, and what moves."""

import dataclasses
import functools
import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gkv_jax.cache import Cache, CacheSpec, Layout, init_cache
from gkv_jax.models.llama import Llama
from gkv_jax.prefill import prefill_chunk
from gkv_jax.step import StepInputs, forward
from tests.aot.hlo import Program
from tests.aot.test_decode_loop import CONFIG as TWO_LAYERS
from tests.aot.test_decode_loop import param_shapes
from tests.aot.topology import GENERATIONS, Generation, tpu_devices

pytestmark = pytest.mark.aot

# Three layers, of which the last has pages; what is not the cache is small, to compile fast.
CONFIG = dataclasses.replace(
    TWO_LAYERS, num_layers=3, vocab_size=1024, hidden_size=256, intermediate_size=256
)
MODEL = Llama(CONFIG)
HEADS, DIM = CONFIG.num_kv_heads, CONFIG.head_dim
BATCH, TOKENS, BUDGET, CHUNK = 2, 65536, 1024, 256
SPECS = {
    memory: CacheSpec(policy="quest", sinks=0, window=TOKENS, budget=BUDGET, memory=memory)
    for memory in ("device", "host")
}
Memory = Literal["device", "host"]
KINDS: dict[Memory, str] = {"device": "device", "host": "pinned_host"}


def steps(params: Any, cache: Cache, inputs: StepInputs, *, spec: CacheSpec) -> Cache:
    """The forward passes of a decode loop, each with the tokens after the last one's."""

    def body(carry: tuple[Cache, StepInputs]) -> tuple[Cache, StepInputs]:
        cache, inputs = carry
        hidden, cache, _ = forward(
            params, cache, inputs, model=MODEL, spec=spec, kernel="mosaic_tpu"
        )
        tokens = jnp.argmax(hidden, axis=-1).astype(jnp.int32)
        after = dataclasses.replace(inputs, tokens=tokens, next_pos=inputs.next_pos + 1)
        return cache, dataclasses.replace(after, go=after.next_pos[0] < TOKENS)

    return jax.lax.while_loop(lambda carry: carry[1].go, body, (cache, inputs))[0]


@functools.cache
def compiled(generation: Generation, program: str, memory: Memory) -> jax.stages.Compiled:
    spec, mesh = SPECS[memory], Mesh(np.array(tpu_devices(generation)[:1]), ("chip",))
    placement = {
        # The type of an abstract array tells its memory only under a NamedSharding.
        name: NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
        for name, kind in KINDS.items()
    }

    def place(tree: Any, memory: Memory = "device") -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement[memory]),
            tree,
        )

    params = place(param_shapes(MODEL))
    cache = jax.eval_shape(lambda: init_cache(spec, MODEL, BATCH, jnp.dtype(jnp.bfloat16)))
    layout = Layout.of(spec, MODEL)
    layers = []
    for index, layer in enumerate(cache.layers):
        where = layout.spec(index).memory
        layers.append(
            dataclasses.replace(place(layer), k=place(layer.k, where), v=place(layer.v, where))
        )
    cache = Cache(tuple(layers), place(cache.slots))
    if program == "steps":
        function = functools.partial(steps, spec=spec)
        answer, rows = jnp.zeros((BATCH, spec.queries + 4), jnp.int32), jnp.zeros(BATCH, jnp.int32)
        operands = (place(jax.eval_shape(StepInputs.unpack, answer, rows)),)
    else:
        function = functools.partial(prefill_chunk.__wrapped__, model=MODEL, spec=spec)
        operands = tuple(place(jnp.zeros(shape, jnp.int32)) for shape in (CHUNK, (), (), ()))
    return jax.jit(function, donate_argnums=1).lower(params, cache, *operands).compile()


def whole_copies(program: Program) -> list[str]:
    """Instructions that make another buffer of the size of K."""
    return [
        i.name
        for i in program.buffers
        if i.opcode in ("copy", "copy-start", "transpose")
        and any(a.size == BATCH * HEADS * TOKENS * DIM for a in i.arrays)
    ]


BUFFER = 2 * BATCH * HEADS * TOKENS * DIM  # bytes of K, and of V
# What a program may fetch from the host: pages that queries choose, or a row for a chunk to attend to.
LARGEST = {"steps": BATCH * HEADS * BUDGET * DIM, "prefill": HEADS * TOKENS * DIM}


def cases(*names: Any, first: tuple[Any, ...]) -> list[Any]:
    return [
        pytest.param(*case, marks=() if case == first else pytest.mark.full)
        for case in itertools.product(GENERATIONS, *names)
    ]


@pytest.mark.parametrize(("generation", "name"), cases(LARGEST, first=("v5e", "steps")))
def test_pages_stay_on_the_host(generation: Generation, name: str) -> None:
    """Buffers of the third layer change in place, in one call of the host, and none is moved whole."""
    result = compiled(generation, name, "host")
    memory = result.memory_analysis()
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == 2 * BUFFER
    assert memory.host_temp_size_in_bytes == 0
    # The two layers that are read whole are on the device, and bounds, a sixteenth each of K and V.
    assert 4 * BUFFER < memory.argument_size_in_bytes < 4.5 * BUFFER
    program = Program.of(result)
    assert whole_copies(program) == []
    (call,) = [
        i
        for body in program.computations.values()
        for i in body
        if i.attribute("custom_call_target") == "HostExecute" and i.opcode == "custom-call-start"
    ]
    moved = [a.size for a in call.arrays if 2 * a.size != BUFFER]
    assert len(moved) == len(call.arrays) - 4  # operands and results are listed alike
    assert max(moved) == LARGEST[name]


@pytest.mark.parametrize("generation", cases(first=("v5e",)))
def test_pages_are_read_from_the_device_as_they_lie(generation: Generation) -> None:
    """A step does not touch the other pages: else Quest would cost more than it saves."""
    result = compiled(generation, "steps", "device")
    assert whole_copies(Program.of(result)) == []
    memory = result.memory_analysis()
    assert memory.temp_size_in_bytes < BUFFER / 4
    assert memory.alias_size_in_bytes > 6 * BUFFER
