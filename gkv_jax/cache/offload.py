"""Keys and values in the host's memory, of which the device fetches the pages that Quest chooses.

Under ``CacheSpec(policy="quest", memory="host")`` the layers that read pages keep K and V in pinned
host memory; their page bounds, and the first layers, which are read whole, stay on the device. A step
chooses pages there, writes its tokens to the host's buffers and fetches its pages by their numbers. All
of that is part of the compiled loop, which calls no Python for it.

What it costs. A step fetches ``2 · Hk · budget · D`` elements a layer and query. Llama 3 8B (30 layers
with pages, Hk = 8, D = 128) in bfloat16 with a budget of 2048 tokens: 8.4 MB a layer, 252 MB a step and
row, which is 5 ms at 50 GB/s (PCIe 5). Drafts multiply it, as every query has pages of its own. In
exchange, of the 8.6 GB of a row with 65 536 tokens, 1.0 GB stay on the device: 0.5 GB of bounds (a
sixteenth, at 16 tokens a page) and the two layers that are read whole. Prompts attend to everything, so
that every chunk fetches its whole row, a layer at a time: 268 MB, or 8 GB and 160 ms a chunk at that
size. Set ``prefill_chunk`` as high as memory allows.

What compilers make of it. XLA:GPU has its kernels read and write pinned memory in place (it warns of a
"host compute", which is none). But it gathers into the host's memory before it copies to the device, so
that fetched bytes cross the bus three times. XLA:TPU turns writing and fetching into one call of a
program on the host's own CPU for each layer; what its runtime does to lay buffers out for that CPU, the
compiled program does not show. On a CPU the two memories are one: there it is for tests. The programs for
GPU and TPU have been compiled and read, never run: measure before you rely on them.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.typing import DTypeLike

from gkv_jax.cache.storage import Stored, encode
from gkv_jax.errors import UserError

_DEVICE, _HOST = jax.memory.Space.Device, jax.memory.Space.Host


def empty(shape: tuple[int, int, int, int], dtype: DTypeLike) -> Stored:
    """Buffers ``[B,Hk,C,D]`` as ``storage.empty`` makes them, in host memory from the start.

    Raises:
      UserError: the device has no host memory that it could reach.
    """
    device = jax.devices()[0]
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        raise UserError(
            f"cache.memory is 'host', but {device.platform} devices have no pinned host memory; "
            "choose 'device'"
        )
    scale = np.ones(shape[:3], np.float32) if jnp.dtype(dtype) == jnp.int8 else None
    data, scale = jax.tree.map(
        lambda buffer: jax.device_put(buffer, _HOST), (np.zeros(shape, dtype), scale)
    )
    return Stored(data, scale)


def is_on_host(stored: Stored) -> bool:
    """Whether the buffers lie in host memory. Their type says so, in compiled programs too."""
    on_host: bool = jax.typeof(stored.data).memory_space == _HOST
    return on_host


def fetch(stored: Stored, rows: jax.Array, pages: jax.Array, page: int) -> Stored:
    """Tokens ``[b,Hk,M·page,D]`` of ``pages``, int32 ``[b,Hk,M]``, of ``rows [b]``, on the device.

    Pages that do not exist must not be asked for.
    """
    _, heads, capacity = stored.data.shape[:3]
    per_head = capacity // page
    flat = (rows[:, None, None] * heads + jnp.arange(heads)[None, :, None]) * per_head + pages
    index = flat.reshape(-1, 1)

    def gather(buffer: jax.Array, index: jax.Array) -> jax.Array:
        # Pages as one list. XLA:TPU gathers these as they lie; with a row, a head and a slot for an
        # index it would convert the whole buffer to another layout, in every step.
        listed = buffer.reshape(-1, page, *buffer.shape[3:])
        return lax.gather(
            listed,
            index,
            lax.GatherDimensionNumbers(
                offset_dims=tuple(range(1, listed.ndim)),
                collapsed_slice_dims=(0,),
                start_index_map=(0,),
            ),
            slice_sizes=(1, *listed.shape[1:]),
            mode="promise_in_bounds",
        )

    def take(buffer: jax.Array) -> jax.Array:
        if is_on_host(stored):
            taken = _to_device(_where_it_lies(gather, buffer, jax.device_put(index, _HOST)))
        else:
            taken = gather(buffer, index)
        return taken.reshape(*pages.shape[:2], -1, *buffer.shape[3:])

    fetched: Stored = jax.tree.map(take, stored)
    return fetched


def fetch_row(stored: Stored, row: jax.Array) -> Stored:
    """All tokens ``[1,Hk,C,D]`` of ``row``, an int32 scalar, on the device."""

    if not is_on_host(stored):
        return jax.tree.map(lambda buffer: buffer[row[None]], stored)

    def take(buffer: jax.Array) -> jax.Array:
        part = functools.partial(lax.dynamic_slice_in_dim, slice_size=1)
        return _to_device(_where_it_lies(part, buffer, jax.device_put(row, _HOST)))

    fetched: Stored = jax.tree.map(take, stored)
    return fetched


def write(stored: Stored, rows: jax.Array, slots: jax.Array, values: jax.Array) -> Stored:
    """``storage.write`` for buffers in host memory: ``rows`` int32 ``[b,N or 1]``, ``slots [b,N]``."""
    heads = jnp.arange(values.shape[2])[None, None, :]
    index = jax.device_put(_index(rows[:, :, None], heads, slots[:, :, None]), _HOST)

    def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
        tail = buffer.shape[3:]
        scatter = functools.partial(
            lax.scatter,
            dimension_numbers=lax.ScatterDimensionNumbers(
                update_window_dims=tuple(range(1, 1 + len(tail))),
                inserted_window_dims=(0, 1, 2),
                scatter_dims_to_operand_dims=(0, 1, 2),
            ),
            mode="drop",
        )
        return _where_it_lies(scatter, buffer, index, jax.device_put(new.reshape(-1, *tail), _HOST))

    written: Stored = jax.tree.map(put, stored, encode(values, stored.data.dtype))
    return written


def _index(*parts: jax.Array) -> jax.Array:
    """Index arrays that broadcast together, as a list of their tuples: int32 ``[M,len(parts)]``."""
    return jnp.stack(jnp.broadcast_arrays(*parts), axis=-1).reshape(-1, len(parts))


def _where_it_lies(operation: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """``operation`` on operands in host memory.

    XLA:TPU can do it in a computation of the host, which changes its operand in place. XLA:GPU would
    copy the whole operand around such a computation; its kernels reach the memory by themselves.
    """
    result: jax.Array = lax.platform_dependent(
        *operands, tpu=compute_on("device_host")(jax.jit(operation)), default=operation
    )
    return result


def _to_device(array: jax.Array) -> jax.Array:
    # Behind the barrier is a copy; without it, XLA:GPU would let a product read the host's memory, and
    # then refuse to compile it.
    arrived: jax.Array = lax.optimization_barrier(jax.device_put(array, _DEVICE))
    return arrived
