"""Quest with its pages in host memory, compiled for TPUs: what lies where, and what moves in a step."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gkv_jax.cache import Cache, CacheSpec, Layout, init_cache
from gkv_jax.decode import device_loop, prefill_chunk
from gkv_jax.models.llama import Llama
from gkv_jax.sampling import greedy_rows
from gkv_jax.weights.parameters import tree_of
from tests.aot.hlo import Instruction, Program
from tests.aot.test_decode_loop import CONFIG as TWO_LAYERS
from tests.aot.topology import GENERATIONS, Generation, tpu_devices

pytestmark = pytest.mark.aot

# Three layers, of which the last has pages; what is not the cache is small, to compile fast.
CONFIG = dataclasses.replace(
    TWO_LAYERS, num_layers=3, vocab_size=1024, hidden_size=256, intermediate_size=256
)
MODEL = Llama(CONFIG)
HEADS, DIM = CONFIG.num_kv_heads, CONFIG.head_dim
BATCH, TOKENS, BUDGET, CHUNK = 2, 65536, 1024, 256
SPEC = CacheSpec(policy="quest", sinks=0, window=TOKENS, budget=BUDGET, memory="host")
KINDS = {"device": "device", "host": "pinned_host"}


def shapes(generation: Generation) -> tuple[Any, Cache, Any]:
    """Parameters, cache and a function that places another tree, on one chip and its host."""
    mesh = Mesh(np.array(tpu_devices(generation)[:1]), ("chip",))
    placement = {
        # The type of an abstract array tells its memory only under a NamedSharding.
        memory: NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
        for memory, kind in KINDS.items()
    }

    def place(tree: Any, memory: str = "device") -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement[memory]),
            tree,
        )

    stored = tree_of(CONFIG, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16))
    params = place(jax.eval_shape(MODEL.from_checkpoint, stored))
    cache = jax.eval_shape(lambda: init_cache(SPEC, MODEL, BATCH, jnp.dtype(jnp.bfloat16)))
    layout = Layout.of(SPEC, MODEL)
    layers = []
    for index, layer in enumerate(cache.layers):
        memory = layout.spec(index).memory
        k, v = place(layer.k, memory), place(layer.v, memory)
        layers.append(dataclasses.replace(place(layer), k=k, v=v))
    return params, Cache(tuple(layers), place(cache.slots)), place


@functools.cache
def compiled(generation: Generation, program: str) -> jax.stages.Compiled:
    params, cache, place = shapes(generation)

    def integers(*shape: int) -> Any:
        return place(jax.ShapeDtypeStruct(shape, jnp.int32))

    if program == "loop":
        function = functools.partial(
            device_loop.__wrapped__, model=MODEL, spec=SPEC, kernel="mosaic_tpu"
        )
        operands = (
            integers(BATCH, SPEC.queries + 4), integers(BATCH), place(greedy_rows(BATCH)), integers(),
        )  # fmt: skip
    else:
        function = functools.partial(prefill_chunk.__wrapped__, model=MODEL, spec=SPEC)
        operands = integers(CHUNK), integers(), integers(), integers()
    return jax.jit(function, donate_argnums=1).lower(params, cache, *operands).compile()


def host_calls(program: Program) -> list[Instruction]:
    """The starts of programs on the host's CPU."""
    return [
        i
        for body in program.computations.values()
        for i in body
        if i.attribute("custom_call_target") == "HostExecute" and i.opcode == "custom-call-start"
    ]


# What a program may fetch from the host: pages that queries choose, or a row and the chunk's pages.
LARGEST = {"loop": BATCH * HEADS * BUDGET * DIM, "prefill": HEADS * TOKENS * DIM}
CI_SIZE = [("v5e", "loop")]
MATRIX = [
    pytest.param(*case, marks=() if case in CI_SIZE else pytest.mark.full)
    for case in itertools.product(GENERATIONS, LARGEST)
]


@pytest.mark.parametrize(("generation", "name"), MATRIX)
def test_pages_stay_on_the_host(generation: Generation, name: str) -> None:
    """Both buffers of the third layer, changed in place, one call of the host, no whole copy anywhere."""
    result = compiled(generation, name)
    memory = result.memory_analysis()
    buffer = 2 * BATCH * HEADS * TOKENS * DIM
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == 2 * buffer
    assert memory.host_temp_size_in_bytes == 0
    # The two layers that are read whole are on the device; so are bounds, a sixteenth each of K and V.
    on_device = memory.argument_size_in_bytes
    assert 4 * buffer < on_device < 4.5 * buffer
    program = Program.of(result)
    (call,) = host_calls(program)
    whole = (BATCH, HEADS, TOKENS, DIM)
    held = [a for a in call.arrays if a.shape == whole]
    moved = [a.size for a in call.arrays if a.shape != whole]
    assert len(held) == 4  # operands and results are listed alike
    assert max(moved) == LARGEST[name]
    copies = [
        i.name
        for i in program.buffers
        if i.opcode in ("copy", "copy-start", "transpose")
        and any(sorted(a.shape) == sorted(whole) for a in i.arrays)
    ]
    assert copies == []
