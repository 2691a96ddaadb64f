"""The whole decode loop, compiled for TPUs: what runs when, and that the cache is never copied."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.compile_matrix.cases import Case
from gkv_jax.cache import Cache, CacheSpec, init_cache
from gkv_jax.decode import device_loop, drafting_loop
from gkv_jax.models.llama import Llama
from gkv_jax.models.rope_config import RopeConfig
from gkv_jax.prefill import prefill_chunk
from gkv_jax.sampling import MAX_LOGPROBS, greedy_rows
from gkv_jax.weights.parameters import tree_of
from pallas_kernels.dispatch import Implementation
from tests.aot.hlo import Instruction, Program
from tests.aot.topology import GENERATIONS, Generation, compile_for, tpu_devices
from tests.gkv_jax.tiny import tiny_config

pytestmark = pytest.mark.aot

# Two layers of Llama-3's proportions, and a cache that no VMEM can hold: a buffer that fits there
# XLA may take in and write back, which is a decision about small caches and not the rule.
CONFIG = tiny_config(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=2,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rope=RopeConfig(500_000.0),
)
MODEL = Llama(CONFIG)
# A draft model whose buffers have a shape of their own.
DRAFT_CONFIG = tiny_config(
    vocab_size=128256,
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
    rope=RopeConfig(500_000.0),
)
DRAFT_MODEL = Llama(DRAFT_CONFIG)
SPECS = ("window", "drafts", "snapkv", "full", "h2o", "snapkv again", "quest", "int8")


def spec_of(name: str, batch: int) -> CacheSpec:
    """A cache of 131 072 tokens for the batch: buffers of 268 MB."""
    tokens = 131072 // batch
    return {
        "window": CacheSpec(sinks=4, window=tokens - 4),
        "drafts": CacheSpec(sinks=4, window=tokens - 4, max_drafts=4),
        "snapkv": CacheSpec(policy="snapkv", sinks=4, kept=tokens // 2 - 4, window=tokens // 2),
        "full": CacheSpec.full(tokens),
        "h2o": CacheSpec(policy="h2o", sinks=4, kept=tokens // 2 - 4, window=tokens // 2),
        "snapkv again": CacheSpec(
            policy="snapkv", decode="snapkv", sinks=4, kept=tokens // 2 - 36, window=tokens // 2,
            interval=32, max_drafts=4,
        ),
        "quest": CacheSpec(policy="quest", sinks=0, window=tokens, budget=1024),
        "int8": CacheSpec(sinks=4, window=tokens - 4, dtype="int8"),
    }[name]  # fmt: skip


@functools.cache
def shapes(
    spec: CacheSpec, batch: int, width: int | None = None
) -> tuple[Any, Cache, Any, Any, Any, Any]:
    """A loop's operands; it is ``width`` tokens wide, or as wide as the spec allows."""
    params = param_shapes(MODEL)
    cache = cache_shapes(spec, MODEL, batch)
    answer = jax.ShapeDtypeStruct((batch, (width or spec.queries) + 4), jnp.int32)
    rows = jax.ShapeDtypeStruct((batch,), jnp.int32)
    sampling = greedy_rows(batch)
    return params, cache, answer, rows, sampling, jax.ShapeDtypeStruct((), jnp.int32)


def param_shapes(model: Llama) -> Any:
    return tree_of(model, lambda leaf: jax.ShapeDtypeStruct(leaf.tree_shape, jnp.bfloat16))


def cache_shapes(spec: CacheSpec, model: Llama, batch: int) -> Cache:
    return jax.eval_shape(lambda: init_cache(spec, model, batch, jnp.bfloat16))


@functools.cache
def compiled_loop(
    generation: Generation, name: str, batch: int, width: int | None = None
) -> jax.stages.Compiled:
    # The attention kernel has no room for the sums of so many slots: without a name, XLA does it.
    kernel: Implementation = "xla" if name == "h2o" else "mosaic_tpu"
    spec = spec_of(name, batch)
    loop = functools.partial(device_loop.__wrapped__, model=MODEL, spec=spec, kernel=kernel)
    return compile_for(generation, loop, *shapes(spec, batch, width), donate_argnums=1)


@functools.cache
def compiled_drafting_loop(generation: Generation, batch: int) -> jax.stages.Compiled:
    """Both models with caches of the same spec."""
    spec = spec_of("drafts", batch)
    loop = functools.partial(
        drafting_loop.__wrapped__,
        model=MODEL,
        spec=spec,
        draft_model=DRAFT_MODEL,
        draft_spec=spec,
        kernel="mosaic_tpu",
    )
    params, cache, answer, rows, sampling, handle = shapes(spec, batch)
    draft = param_shapes(DRAFT_MODEL), cache_shapes(spec, DRAFT_MODEL, batch)
    operands = (params, cache, *draft, answer, rows, sampling, None, handle)
    return compile_for(generation, loop, *operands, donate_argnums=(1, 3))


def body_of(program: Program) -> list[Instruction]:
    """The decode loop's own body: the one that talks to the host."""
    (body,) = [b for b in program.while_bodies() if any(i.opcode == "send" for i in b)]
    return body


def where(body: list[Instruction], opcode: str, dtype: str, *shape: int) -> int:
    """Place of the one ``send`` or ``recv`` that carries such an array."""
    (found,) = [
        at
        for at, i in enumerate(body)
        if i.opcode == opcode and (i.arrays[0].dtype, i.arrays[0].shape) == (dtype, shape)
    ]
    return found


# Compiling the loop takes half a minute: the other generations are for the full size.
FEW = [pytest.param(g, marks=() if g == "v5e" else pytest.mark.full) for g in GENERATIONS]


@pytest.mark.parametrize("generation", FEW)
def test_the_forward_pass_lies_between_submit_and_collect(generation: Generation) -> None:
    """The body is a cycle: submit ends a turn and its answer is what the next turn's layers read."""
    spec, batch = spec_of("drafts", 8), 8
    program = Program.of(compiled_loop(generation, "drafts", batch))
    assert program.is_scheduled
    body = body_of(program)
    words = CONFIG.vocab_size // 32 + 1
    dependence = where(body, "send", "bf16")  # a scalar of the hidden states
    masks = where(body, "recv", "s32", batch, spec.queries, words)
    reported = spec.queries * (1 + 2 * MAX_LOGPROBS)
    sampled = where(body, "send", "s32", batch, spec.queries + 2 + reported)
    answer = where(body, "recv", "s32", batch, spec.queries + 4)
    layers = {
        layer: [
            at for at, i in enumerate(body) if i.opcode == "fusion" and f"layer{layer}/" in i.rest
        ]
        for layer in range(CONFIG.num_layers)
    }
    assert all(len(places) > 0 for places in layers.values())
    first, last = min(layers[0]), max(layers[CONFIG.num_layers - 1])
    assert first < last < masks < sampled < answer
    assert last < dependence < masks


@pytest.mark.parametrize("generation", FEW)
def test_the_loop_runs_the_kernels(generation: Generation) -> None:
    """One attention a layer in the body, and in the branches after it the head and the samplers."""
    program = Program.of(compiled_loop(generation, "drafts", 8))
    kernels = [
        i.name.partition(".")[0]
        for body in program.computations.values()
        for i in body
        if i.attribute("custom_call_target") == "tpu_custom_call"
    ]
    assert kernels.count("decode_attention") == CONFIG.num_layers
    assert kernels.count("masked_head") == 1
    assert kernels.count("masked_sample") == 2  # of logits as they are, and of biased ones
    in_body = [i.name for i in body_of(program) if "pallas_call" in i.rest]
    assert len([name for name in in_body if name.startswith("decode_attention")]) == len(in_body)


@pytest.mark.parametrize(("width", "options"), [(1, {"width": 1}), (5, {})])
def test_a_bias_is_fetched_by_its_branch_alone(width: int, options: dict[str, int]) -> None:
    batch = 8
    program = Program.of(compiled_loop("v5e", "drafts", batch, **options))
    fetched = batch, CONFIG.vocab_size + width - 1
    fetching = [b for b in program.computations.values() if carries(b, "recv", "f32", *fetched)]
    assert len(fetching) == 1
    assert fetching[0] not in program.while_bodies()


# A loop compiles in 4 to 10 s: the three that the schedule test needs too, one of each policy, and
# a batch of one, whose scatter has a single index. The rest of the matrix is for the full size.
CI_SIZE = {(generation, "drafts", 8) for generation in GENERATIONS} | {
    ("v5e", "window", 1), ("v5e", "snapkv", 8), ("v5e", "full", 8)
}  # fmt: skip
MATRIX = [
    pytest.param(*case, marks=() if case in CI_SIZE else pytest.mark.full)
    for case in itertools.product(GENERATIONS, SPECS, (1, 8))
]


@pytest.mark.parametrize(("generation", "name", "batch"), MATRIX)
def test_the_cache_is_updated_in_place(generation: Generation, name: str, batch: int) -> None:
    check_in_place(compiled_loop(generation, name, batch), spec_of(name, batch), batch, MODEL)


@pytest.mark.parametrize("name", ["drafts", pytest.param("snapkv again", marks=pytest.mark.full)])
def test_a_narrow_step_updates_in_place_a_cache_with_room_for_drafts(name: str) -> None:
    check_in_place(compiled_loop("v5e", name, 8, width=1), spec_of(name, 8), 8, MODEL)


def check_in_place(
    compiled: jax.stages.Compiled, spec: CacheSpec, batch: int, *models: Llama
) -> None:
    """No buffer of any of the models' caches is copied, under whatever name."""
    caches = [cache_shapes(spec, model, batch) for model in models]
    buffers = [
        (batch, model.config.num_kv_heads, spec.capacity, model.config.head_dim) for model in models
    ]
    copies = [
        f"{i.name} {i.opcode}"
        for i in Program.of(compiled).buffers
        if i.opcode in ("copy", "copy-start", "transpose")
        and any(sorted(a.shape) == sorted(shape) for a in i.arrays for shape in buffers)
    ]
    assert copies == []
    memory = compiled.memory_analysis()

    def layer_bytes(cache: Cache) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.layers[0]))

    layers = sum(len(cache.layers) * layer_bytes(cache) for cache in caches)
    assert memory.alias_size_in_bytes >= layers
    assert memory.temp_size_in_bytes < min(map(layer_bytes, caches))


@pytest.mark.parametrize("generation", FEW)
def test_both_caches_of_the_drafting_loop_are_updated_in_place(generation: Generation) -> None:
    compiled = compiled_drafting_loop(generation, 8)
    check_in_place(compiled, spec_of("drafts", 8), 8, MODEL, DRAFT_MODEL)


@pytest.mark.parametrize("generation", FEW)
def test_drafting_is_a_loop_within_a_turn(generation: Generation) -> None:
    """Its passes talk to the host from loops of their own, all of them before the model's forward."""
    spec, batch = spec_of("drafts", 8), 8
    program = Program.of(compiled_drafting_loop(generation, batch))
    assert program.is_scheduled
    words = CONFIG.vocab_size // 32 + 1
    drafts, masks = (batch, 1), (batch, 1, words)
    talking = [body for body in program.while_bodies() if any(i.opcode == "send" for i in body)]
    passes = [body for body in talking if carries(body, "send", "s32", *drafts)]
    assert [len(passes), len(talking)] == [2, 3]  # a pass reads one token a row, or N
    (turn,) = [body for body in talking if body not in passes]
    for body in passes:
        dependence = where(body, "send", "bf16")
        masked = where(body, "recv", "s32", *masks)
        sampled = where(body, "send", "s32", *drafts)
        answer = where(body, "recv", "s32", batch, spec.queries + 4)
        assert dependence < masked < sampled < answer
    drafting = [
        at for at, i in enumerate(turn) if i.opcode == "while" and reaches(program, i, passes)
    ]
    forward = [
        at for at, i in enumerate(turn)
        if i.opcode == "custom-call" and i.name.startswith("decode_attention")
    ]  # fmt: skip
    assert len(drafting) == 1
    assert len(forward) == CONFIG.num_layers
    assert drafting[0] < min(forward)


def carries(body: list[Instruction], opcode: str, dtype: str, *shape: int) -> bool:
    return any(
        i.opcode == opcode and (i.arrays[0].dtype, i.arrays[0].shape) == (dtype, shape)
        for i in body
    )


def reaches(program: Program, loop: Instruction, bodies: list[list[Instruction]]) -> bool:
    """Whether a ``while`` holds all of these loops' bodies, at whatever depth."""
    found, waiting = [], [loop]
    while waiting:
        name = waiting.pop().attribute("body")
        assert name is not None
        body = program.computations[name]
        found.append(body)
        waiting += [i for i in body if i.opcode == "while"]
    return all(body in found for body in bodies)


def test_prefill_compiles_and_keeps_the_cache_in_place() -> None:
    spec = spec_of("window", 8)
    params, cache, *_ = shapes(spec, 8)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    prefill = functools.partial(prefill_chunk.__wrapped__, model=MODEL, spec=spec)
    tokens = jax.ShapeDtypeStruct((256,), jnp.int32)
    compiled = compile_for("v5e", prefill, params, cache, tokens, *[scalar] * 3, donate_argnums=1)
    cache_shape = (8, CONFIG.num_kv_heads, spec.capacity, CONFIG.head_dim)
    copies = [
        i.name
        for i in Program.of(compiled).buffers
        if i.opcode in ("copy", "copy-start") and any(a.shape == cache_shape for a in i.arrays)
    ]
    assert copies == []


@pytest.mark.full
@pytest.mark.parametrize("generation", GENERATIONS)
def test_four_chips_share_the_loop(generation: Generation) -> None:
    """Each holds a quarter of the heads, features and vocabulary; what travels is small."""
    case = Case(
        "decode_loop_4_chips", "xla", "bfloat16",
        {"vocab": 128256, "batch": 8, "queries": 5, "capacity": 16384}, generation,
    )  # fmt: skip
    program = case.program()
    assert program.place is not None
    operands = program.place(tpu_devices(generation))
    loop = jax.jit(program.function, donate_argnums=program.donate)
    compiled = loop.lower(*operands).compile()
    memory = compiled.memory_analysis()
    params, cache = operands[:2]
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, cache)))
    assert memory.argument_size_in_bytes < 1.1 * whole / 4
    quarter = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)) / 4
    assert memory.alias_size_in_bytes >= 0.99 * quarter
    logits = 8 * 5 * 128256
    travels = [
        array
        for body in Program.of(compiled).computations.values()
        for i in body
        if i.opcode.startswith(("all-gather", "all-to-all", "collective-permute"))
        for array in i.arrays
    ]
    assert travels
    assert max(array.size for array in travels) <= 1.1 * logits
