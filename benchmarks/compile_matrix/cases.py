"""What is compiled for whom: the kernels as builders of programs, and the chips as plain figures.

A new kernel is one builder and one entry of ``KERNELS``. Nothing here compiles or asks for a device.
"""

import dataclasses
import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Platform = Literal["tpu", "cuda"]


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip to compile for.

    Attributes:
      platform: whose compiler.
      bandwidth: bytes per second between one device and its memory, as the vendor publishes it.
      topology: the name by which libtpu knows the smallest host of such chips; empty for GPUs.
      chip_config: the name of libtpu's way to divide a chip into devices.
    """

    platform: Platform
    bandwidth: float
    topology: str = ""
    chip_config: str = "default"


# The two cores of a v4 are one device under JAX, which libtpu calls megacore. Those of a v7x are two,
# each with half of the chip's 7380 GB/s.
TARGETS: dict[str, Target] = {
    "v4": Target("tpu", 1228e9, "v4:2x2x1", "megacore"),
    "v5e": Target("tpu", 819e9, "v5e:2x2"),
    "v5p": Target("tpu", 2765e9, "v5p:2x2x1"),
    "v6e": Target("tpu", 1640e9, "v6e:2x2"),
    "v7x": Target("tpu", 3690e9, "tpu7x:2x2x1"),
    "A100": Target("cuda", 2039e9),
    "H100": Target("cuda", 3350e9),
    "H200": Target("cuda", 4800e9),
    "B200": Target("cuda", 7700e9),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """Something to compile.

    Attributes:
      function: a function of ``operands``; ``jit`` is applied to it.
      operands: trees of ``ShapeDtypeStruct``.
      minimal_bytes: what it must move to and from memory: every byte that it needs read once, every
        byte of the result written once, however often the operands could be cached.
      donate: as ``donate_argnums`` of ``jit``.
      place: for programs of several chips: from the devices of one host to ``operands`` with a
        sharding on every leaf. None puts all of them on the first device.
    """

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    minimal_bytes: int
    donate: tuple[int, ...] = ()
    place: Callable[[Sequence[Any]], tuple[Any, ...]] | None = None


_PLATFORMS: dict[str, tuple[Platform, ...]] = {
    "mosaic_tpu": ("tpu",),
    "triton": ("cuda",),
}

Size = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A family of programs.

    Attributes:
      build: makes the program from ``implementation``, ``dtype`` and the numbers of a size.
      dtypes: the implementations, and for which dtypes each is compiled.
      sizes: keyword arguments of ``build``; the first one is the quick size.
      needs: the module without which there is no such kernel; of those in ``pallas_kernels``, the
        package with one module for each implementation.
      platforms: where programs run that are plain XLA.
    """

    build: Callable[..., Program]
    dtypes: Mapping[str, Sequence[str]]
    sizes: Sequence[Size]
    needs: str
    platforms: Collection[Platform] = ("tpu", "cuda")

    @property
    def existing(self) -> dict[str, Sequence[str]]:
        """``dtypes`` without the implementations that there are no modules for."""
        package = "pallas_kernels" in self.needs
        return {
            implementation: dtypes
            for implementation, dtypes in self.dtypes.items()
            if _can_find(f"{self.needs}.{implementation}" if package else self.needs)
        }


def _can_find(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


@dataclasses.dataclass(frozen=True)
class Case:
    """One program for one chip, by names only, so that it can be sent to another process.

    Attributes:
      kernel: a key of ``KERNELS``, or ``module:function`` for a builder that is not in there.
      implementation: ``xla``, ``mosaic_tpu`` or ``triton``.
      dtype: the name of a dtype.
      size: keyword arguments of the builder.
      target: a key of ``TARGETS``.
    """

    kernel: str
    implementation: str
    dtype: str
    size: Size
    target: str

    def __hash__(self) -> int:
        return hash(self.name)  # a size is a dict

    @property
    def name(self) -> str:
        numbers = " ".join(f"{key}={value}" for key, value in self.size.items())
        return f"{self.kernel} {self.implementation} {self.target} {self.dtype} {numbers}"

    def program(self) -> Program:
        """Builds the program. Raises what the kernel raises, and KeyError for unknown names."""
        module, _, function = self.kernel.partition(":")
        if function:
            build = getattr(importlib.import_module(module), function)
        else:
            build = KERNELS[self.kernel].build
        program: Program = build(self.implementation, jnp.dtype(self.dtype), **self.size)
        return program


def all_cases(
    *, targets: Collection[str], kernels: Collection[str], quick: bool = False
) -> Iterator[Case]:
    """The cases of the chosen targets and kernels, those of one target together.

    ``quick`` takes the first size and the first dtype of every implementation. Plain XLA beside a
    kernel has no more in any case: it stands there to be compared with.
    """
    for target in targets:
        platform = TARGETS[target].platform
        for name in kernels:
            kernel = KERNELS[name]
            for implementation, dtypes in kernel.existing.items():
                if platform not in _PLATFORMS.get(implementation, kernel.platforms):
                    continue
                few = quick or (implementation == "xla" and len(kernel.dtypes) > 1)
                for dtype in dtypes[:1] if few else dtypes:
                    for size in kernel.sizes[:1] if few else kernel.sizes:
                        yield Case(name, implementation, dtype, size, target)


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def _array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _once(function: Callable[..., Any], operands: tuple[Any, ...]) -> int:
    """Bytes of a function that reads its operands once and writes its results once."""
    return nbytes(operands) + nbytes(jax.eval_shape(function, *operands))


def _num_words(vocab: int) -> int:
    return -(-vocab // 32)


VOCABULARIES = (128256, 49152, 151936, 262208)  # Llama 3, SmolLM2, Qwen 3, Gemma 3


def _bitmask(implementation: str, dtype: Any, *, vocab: int, batch: int, queries: int) -> Program:
    from pallas_kernels.bitmask import apply_token_bitmask

    function = functools.partial(apply_token_bitmask, implementation=implementation)
    operands = (
        _array(dtype, batch, queries, vocab),
        _array(jnp.int32, batch, queries, _num_words(vocab)),
        _array(jnp.int32, batch, queries),
    )
    return Program(function, operands, _once(function, operands), donate=(0,))


def _sampling_operands(batch: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """temperature, top_k, top_p, min_p, seed"""
    kinds = (jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.uint32)
    return tuple(_array(kind, batch) for kind in kinds)


def _masks(batch: int, queries: int, vocab: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """bitmask, enabled, positions"""
    words = _array(jnp.int32, batch, queries, _num_words(vocab))
    return words, _array(jnp.int32, batch, queries), _array(jnp.int32, batch, queries)


def _masked_sample(
    implementation: str, dtype: Any, *, vocab: int, batch: int, queries: int
) -> Program:
    from pallas_kernels.masked_sample import Rows, masked_sample

    function = functools.partial(masked_sample, implementation=implementation)
    logits = _array(dtype, batch, queries, vocab)
    operands = (logits, *_masks(batch, queries, vocab), Rows(*_sampling_operands(batch)))
    return Program(function, operands, _once(function, operands))


def _masked_head(
    implementation: str, dtype: Any, *, vocab: int, batch: int, queries: int, features: int
) -> Program:
    from pallas_kernels.masked_head import masked_head
    from pallas_kernels.masked_sample import Rows

    function = functools.partial(masked_head, implementation=implementation)
    hidden, head = _array(dtype, batch, queries, features), _array(dtype, vocab, features)
    operands = (hidden, head, *_masks(batch, queries, vocab), Rows(*_sampling_operands(batch)))
    return Program(function, operands, _once(function, operands))


def _decode_attention(
    implementation: str,
    dtype: Any,
    *,
    batch: int,
    queries: int,
    heads: int,
    kv_heads: int,
    width: int,
    capacity: int,
    rotations: int,
) -> Program:
    from pallas_kernels.decode_attention import decode_attention

    prefix = 4 if rotations == 2 else 0
    function = functools.partial(
        decode_attention,
        prefix=prefix,
        window=capacity - prefix - queries + 1,
        implementation=implementation,
    )
    query = _array(dtype, batch, queries, heads, width)
    cached = _array(dtype, batch, kv_heads, capacity, width)
    operands = (
        (query,) * rotations,
        cached,
        cached,
        _array(jnp.int32, batch, capacity),
        _array(jnp.int32, batch, queries),
    )
    return Program(function, operands, _once(function, operands))


def _ring_write(
    implementation: str, dtype: Any, *, batch: int, queries: int, capacity: int
) -> Program:
    from gkv_jax.cache.storage import Stored, write

    del implementation  # plain XLA
    values = _array(dtype, batch, queries, 8, 128)
    operands = (
        Stored(_array(dtype, batch, 8, capacity, 128), None),
        _array(jnp.int32, batch, 1),
        _array(jnp.int32, batch, queries),
        values,
    )
    moved = nbytes(operands[1:]) + nbytes(values)  # the rest of the buffer stays as it is
    return Program(write, operands, moved, donate=(0,))


def _snapkv_scores(implementation: str, dtype: Any, *, length: int, kept: int) -> Program:
    from gkv_jax.cache import CacheSpec
    from gkv_jax.cache.policies.snapkv import SNAPKV
    from gkv_jax.cache.prompt import PromptLayer, select
    from gkv_jax.models.protocol import AttentionLayer
    from gkv_jax.models.rope_config import RopeConfig
    from gkv_jax.rope import Rope

    del implementation  # plain XLA
    spec = CacheSpec(policy="snapkv", kept=kept, window=512)
    kind = AttentionLayer(Rope(RopeConfig(500_000.0), 128))

    def function(q: jax.Array, k: jax.Array, length: jax.Array) -> jax.Array:
        q, k = q[None], k[None]
        layer = PromptLayer(kind, length, q, q, k, k, k, 128**-0.5, None, None)
        return select(spec, SNAPKV.score(layer.evidence(SNAPKV, spec, None), spec)[0], length)

    voters, keys = _array(dtype, spec.observe, 32, 128), _array(dtype, length, 8, 128)
    operands = (_array(dtype, length, 32, 128), keys, _array(jnp.int32))
    moved = nbytes((voters, keys)) + nbytes(jax.eval_shape(function, *operands))
    return Program(function, operands, moved)


def _quest_scores(
    implementation: str, dtype: Any, *, batch: int, queries: int, capacity: int
) -> Program:
    from gkv_jax.cache.quest import page_scores

    del implementation  # plain XLA
    bounds = _array(dtype, batch, 8, capacity // 16, 2 * 128)
    operands = (_array(dtype, batch, queries, 32, 128), bounds)
    return Program(page_scores, operands, _once(page_scores, operands))


def _decoder(
    dtype: Any, vocab: int, batch: int, queries: int, capacity: int
) -> tuple[Any, Any, Any, Any]:
    """Two layers in the proportions of Llama 3: model, spec, shapes of parameters and cache."""
    from gkv_jax.cache import CacheSpec, init_cache
    from gkv_jax.models.config import ModelConfig
    from gkv_jax.models.llama import Llama
    from gkv_jax.models.rope_config import RopeConfig
    from gkv_jax.weights.parameters import tree_of

    config = ModelConfig(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=2,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        rope=RopeConfig(500_000.0),
        bos_token_id=None,
        eos_token_ids=(0,),
    )
    model = Llama(config)
    params = tree_of(model, lambda leaf: _array(dtype, *leaf.tree_shape))
    spec = CacheSpec(sinks=4, window=capacity - 3 - queries, max_drafts=queries - 1)
    cache = jax.eval_shape(lambda: init_cache(spec, model, batch, dtype))
    return model, spec, params, cache


def _decode_step(
    implementation: str, dtype: Any, *, vocab: int, batch: int, queries: int, capacity: int
) -> Program:
    """A step without its callbacks. It must move its weights and its cache."""
    from gkv_jax.step import StepInputs, choose, forward
    from pallas_kernels.masked_sample import Rows

    model, spec, params, cache = _decoder(dtype, vocab, batch, queries, capacity)

    def step(
        params: Any, cache: Any, answer: jax.Array, next_pos: jax.Array, masks: jax.Array, rows: Any
    ) -> Any:
        inputs = StepInputs.unpack(answer, next_pos)
        hidden, cache, _ = forward(
            params, cache, inputs, model=model, spec=spec, kernel=implementation
        )
        return cache, choose(
            params, hidden, inputs, masks, rows, model=model, kernel=implementation, head="masked"
        )

    operands = (
        params,
        cache,
        _array(jnp.int32, batch, queries + 4),
        _array(jnp.int32, batch),
        _array(jnp.int32, batch, queries, _num_words(vocab) + 1),
        Rows(*_sampling_operands(batch)),
    )
    return Program(step, operands, nbytes((params, cache)), donate=(1,))


def _decode_loop(
    implementation: str, dtype: Any, *, vocab: int, batch: int, queries: int, capacity: int
) -> Program:
    """The loop with its callbacks. It must move its weights and its cache, once a step."""
    from gkv_jax.decode import device_loop
    from pallas_kernels.masked_sample import Rows

    model, spec, params, cache = _decoder(dtype, vocab, batch, queries, capacity)
    # Jitted already; what is under it takes the static arguments by name.
    loop = functools.partial(device_loop.__wrapped__, model=model, spec=spec, kernel=implementation)
    operands = (
        params,
        cache,
        _array(jnp.int32, batch, queries + 4),
        _array(jnp.int32, batch),
        Rows(*_sampling_operands(batch)),
        _array(jnp.int32),
    )
    return Program(loop, operands, nbytes((params, cache)), donate=(1,))


def _loop_on_four(
    implementation: str, dtype: Any, *, vocab: int, batch: int, queries: int, capacity: int
) -> Program:
    """The loop over four chips: heads, features and vocabulary divided. Bytes are of one chip."""
    from gkv_jax.decode import device_loop
    from pallas_kernels.masked_sample import Rows

    model, spec, params, cache = _decoder(dtype, vocab, batch, queries, capacity)
    # Plain XLA, whose programs the compiler divides; and the whole head, as tiles of one that lies on
    # four chips would be fetched from them one by one.
    loop = functools.partial(
        device_loop.__wrapped__, model=model, spec=spec, kernel=implementation, head="full"
    )
    operands = (
        params,
        cache,
        _array(jnp.int32, batch, queries + 4),
        _array(jnp.int32, batch),
        Rows(*_sampling_operands(batch)),
        _array(jnp.int32),
    )
    # Axis to divide; every other leaf is the same on all chips. Cached heads are the second axis.
    axes = dict.fromkeys(("q", "k", "v", "gate", "up"), 1) | {"o": 0, "down": 0, "embed": 0}

    def place(devices: Sequence[Any]) -> tuple[Any, ...]:
        mesh = jax.sharding.Mesh(np.asarray(devices[:4]), ("model",))

        def put(leaf: Any, axis: int | None) -> jax.ShapeDtypeStruct:
            spec = [] if axis is None else [None] * axis + ["model"]
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return (
            jax.tree_util.tree_map_with_path(
                lambda path, leaf: put(leaf, axes.get(path[-1].key)), params
            ),
            jax.tree.map(lambda leaf: put(leaf, 1 if leaf.ndim == 4 else None), cache),
            *(jax.tree.map(lambda leaf: put(leaf, None), operand) for operand in operands[2:]),
        )

    return Program(loop, operands, nbytes((params, cache)) // 4, donate=(1,), place=place)


_FLOATS = ("float32", "bfloat16")
_LOGITS = {"mosaic_tpu": _FLOATS, "triton": (*_FLOATS, "float16"), "xla": _FLOATS}
_ROWS = (
    *({"vocab": vocab, "batch": 8, "queries": 1} for vocab in VOCABULARIES),
    {"vocab": VOCABULARIES[0], "batch": 8, "queries": 5},
)
_LLAMA = {"heads": 32, "kv_heads": 8, "width": 128}
_SMOLLM = {"heads": 9, "kv_heads": 3, "width": 64}

_DECODER = (
    {"vocab": VOCABULARIES[0], "batch": 8, "queries": 5, "capacity": 16384},
    {"vocab": VOCABULARIES[0], "batch": 1, "queries": 1, "capacity": 131072},
)

KERNELS: dict[str, Kernel] = {
    "bitmask": Kernel(_bitmask, _LOGITS, _ROWS, "pallas_kernels.bitmask"),
    "masked_sample": Kernel(
        _masked_sample,
        {**_LOGITS, "xla": ("float32",)},  # sorts compile for long, and are the same in bfloat16
        _ROWS,
        "pallas_kernels.masked_sample",
    ),
    "masked_head": Kernel(
        _masked_head,
        {"mosaic_tpu": ("bfloat16",), "triton": ("bfloat16",), "xla": ("bfloat16",)},
        [
            *({**rows, "features": 2048} for rows in _ROWS),
            {"vocab": 262144, "batch": 8, "queries": 1, "features": 640},  # Gemma-3-270M
        ],
        "pallas_kernels.masked_head",
    ),
    "decode_attention": Kernel(
        _decode_attention,
        {"mosaic_tpu": ("bfloat16", "float32"), "triton": ("bfloat16", "float32", "float16"),
         "xla": ("bfloat16",)},
        [
            {"batch": 8, "queries": 1, **_LLAMA, "capacity": 1024, "rotations": 2},
            {"batch": 8, "queries": 5, **_LLAMA, "capacity": 1028, "rotations": 2},
            {"batch": 1, "queries": 1, **_LLAMA, "capacity": 32768, "rotations": 1},
            {"batch": 8, "queries": 1, **_SMOLLM, "capacity": 1024, "rotations": 2},
        ],
        "pallas_kernels.decode_attention",
    ),
    "ring_write": Kernel(
        _ring_write,
        {"xla": ("bfloat16",)},
        [
            {"batch": 8, "queries": 1, "capacity": 16384},
            {"batch": 8, "queries": 5, "capacity": 16384},
            {"batch": 1, "queries": 1, "capacity": 131072},
        ],
        "gkv_jax.cache.storage",
    ),
    "snapkv_scores": Kernel(
        _snapkv_scores,
        {"xla": ("bfloat16",)},
        [{"length": 4096, "kept": 508}, {"length": 32768, "kept": 2044}],
        "gkv_jax.cache.prompt",
    ),
    "quest_scores": Kernel(
        _quest_scores,
        {"xla": ("bfloat16",)},
        [
            {"batch": 8, "queries": 1, "capacity": 16384},
            {"batch": 8, "queries": 5, "capacity": 16384},
        ],
        "gkv_jax.cache.quest",
    ),
    "decode_step": Kernel(
        _decode_step,
        {"triton": ("bfloat16",)},
        _DECODER,
        "gkv_jax.decode",
    ),
    # Only for TPUs, which need no step beside it: callbacks compile for a GPU where there is one.
    "decode_loop": Kernel(
        _decode_loop,
        {"mosaic_tpu": ("bfloat16",)},
        _DECODER,
        "gkv_jax.decode",
    ),
    "decode_loop_4_chips": Kernel(
        _loop_on_four, {"xla": ("bfloat16",)}, _DECODER[:1], "gkv_jax.decode", ("tpu",)
    ),
}  # fmt: skip
