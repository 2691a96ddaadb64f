"""Compiles for TPUs that are not there: the real XLA:TPU and Mosaic compilers, on a CPU machine.

libtpu, which `pip install jax[tpu]` brings, is runtime and compiler in one, and the compiler needs
no chip. It finds layout, VMEM and alignment errors, and its scheduled HLO shows which buffers,
copies and host transfers a program really has; `tests.aot.hlo` reads it. It measures no speed.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import Sharding, SingleDeviceSharding

# Where `make test` puts libtpu: outside of site-packages, so that no other program meets it.
sys.path.append(str(Path(sys.prefix) / "libtpu"))

# libtpu reads these when it is loaded, which `get_topology_desc` does on its first call.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # do not ask a cloud's metadata server for a TPU
os.environ.setdefault(
    "ALLOW_MULTIPLE_LIBTPU_LOAD", "1"
)  # no lock file: other processes compile too

# XLA:TPU merges the Python stacks of nested calls in time that explodes with their depth, and under
# pytest every stack is deep: a loop that compiles in 6 s takes minutes. One frame is enough here.
jax.config.update("jax_traceback_in_locations_limit", 1)

Generation = Literal["v4", "v5e", "v6e"]
GENERATIONS: tuple[Generation, ...] = get_args(Generation)

_TOPOLOGY_NAMES: dict[Generation, str] = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v6e": "v6e:2x2"}


@functools.cache
def tpu_devices(generation: Generation) -> Sequence[Any]:
    """The devices of one host with four chips of `generation`, for `Mesh` and shardings.

    They have a platform and a device kind but hold no arrays. Skips the calling test where libtpu
    is not installed.
    """
    pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu (`make test`, on Linux)")
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=_TOPOLOGY_NAMES[generation]
    )
    return topology.devices


def tpu_device(generation: Generation) -> SingleDeviceSharding:
    """The sharding that places an array on the first device of `tpu_devices`."""
    return SingleDeviceSharding(tpu_devices(generation)[0])


def abstract(tree: Any, sharding: Sharding) -> Any:
    """`tree` with every leaf that has a shape and a dtype as a `ShapeDtypeStruct` on `sharding`."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


def compile_for(
    generation: Generation,
    function: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
) -> jax.stages.Compiled:
    """`jit(function)` compiled for one device of `generation`.

    Args:
      generation: the TPU to compile for.
      function: what to compile. It may call `io_callback`. Inside, `jax.default_backend()` is still
        "cpu", so a kernel must be asked for by name.
      args: trees of arrays or `ShapeDtypeStruct`s; only shapes and dtypes matter.
      donate_argnums: as in `jax.jit`.
    """
    args = abstract(args, tpu_device(generation))
    return jax.jit(function, donate_argnums=donate_argnums).lower(*args).compile()
