"""Where arrays lie, as far as it decides whether a program must be compiled again.

To ``jax.jit`` an array that is committed to its device differs from one that is not, and a weakly typed one
from another. Weights come in every form: as a file was read, or out of a training step. So what an engine
holds is always committed, where it lies on one device, and new weights go where the old ones are.

Programs differ by the settings of the thread that calls them, too: see ``Surroundings``.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from gkv_jax.compat import current_mesh

Tree = TypeVar("Tree")


class Surroundings:
    """What JAX takes from the thread that calls it, of the thread that makes this; for others to enter.

    The mesh of ``jax.set_mesh``, and the settings below, each of which is a context manager, too.
    """

    _SETTINGS = ("default_device", "default_matmul_precision", "numpy_dtype_promotion")

    def __init__(self) -> None:
        self._mesh = current_mesh()
        self._values = {name: getattr(jax.config, f"jax_{name}") for name in self._SETTINGS}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """With the same in this thread."""
        with contextlib.ExitStack() as stack:
            if self._mesh is not None and self._mesh != current_mesh():
                stack.enter_context(jax.set_mesh(self._mesh))
            for name, value in self._values.items():
                if getattr(jax.config, f"jax_{name}") != value:  # else they would be set for good
                    stack.enter_context(getattr(jax, name)(value))
            yield


def settle(tree: Tree) -> Tree:
    """The same arrays, committed to the device that they are on; no copies. As they are on several.

    NumPy arrays go to the default device.
    """
    tree = jax.tree.map(_array, tree)
    if single_device(tree) is None:
        return tree
    return jax.tree.map(lambda leaf: _strong(jax.device_put(leaf, leaf.sharding)), tree)


def settle_beside(tree: Tree, others: Any) -> Tree:
    """New arrays, committed as ``others`` are to their one device; as they are if those are not.

    The kind of memory stays the same.
    """
    device = single_device(others)
    if device is None or not all(leaf.committed for leaf in jax.tree.leaves(others)):
        return tree

    def put(leaf: jax.Array) -> jax.Array:
        kind = leaf.sharding.memory_kind
        return jax.device_put(leaf, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))

    return jax.tree.map(put, tree)


def settle_like(tree: Tree, like: Tree) -> Tree:
    """Arrays of the same shapes and dtypes as ``like``, placed as those are: copied where they must be."""

    def put(leaf: jax.Array, old: jax.Array) -> jax.Array:
        return _strong(jax.device_put(leaf, old.sharding) if old.committed else _array(leaf))

    return jax.tree.map(put, tree, like)


def single_device(tree: Any) -> jax.Device | None:
    """The device of all arrays, or None if there are several."""
    devices: set[jax.Device] = set()
    for leaf in jax.tree.leaves(tree):
        devices |= leaf.sharding.device_set
    return devices.pop() if len(devices) == 1 else None


def has_deleted(tree: Any) -> bool:
    """Whether some array is gone: donated to a program, or deleted."""
    leaves = jax.tree.leaves(tree)
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)


def difference(tree: Any, expected: Any) -> str | None:
    """Where arrays first differ from those expected in path, shape or dtype, and how; or None."""

    def kinds(tree: Any) -> dict[str, str]:
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        return {jax.tree_util.keystr(path): _kind(leaf) for path, leaf in leaves}

    found, wanted = kinds(tree), kinds(expected)
    for path in dict.fromkeys([*wanted, *found]):
        if found.get(path) != wanted.get(path):
            given, asked = (each.get(path, "missing") for each in (found, wanted))
            return f"params{path} is {given}, and {asked} in the engine"
    containers: list[Any] = [jax.tree.structure(each) for each in (tree, expected)]
    if containers[0] != containers[1]:
        return "their containers are of other types (dict, list, tuple)"
    return None


def _kind(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    is_random = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    dtype = leaf.dtype if is_random else jax.dtypes.canonicalize_dtype(leaf.dtype)
    return f"{dtype} {list(leaf.shape)}"


def _array(leaf: Any) -> jax.Array:
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def _strong(leaf: jax.Array) -> jax.Array:
    return lax.convert_element_type(leaf, leaf.dtype) if leaf.weak_type else leaf
