"""Where each leaf of a parameter tree goes: one device, one sharding, or a rule by its name.

Leaves are called by their path in the tree: ``embed``, ``layers.3.q``, and ``layers.3.qkv.values`` in
a tree with int8 matrices.
"""

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from gkv_jax.errors import UserError

Rule = Callable[[str, tuple[int, ...]], jax.Device | Sharding]
"""From a leaf's name and its shape in the tree to its place."""

Placement: TypeAlias = jax.Device | Sharding | Rule | None
"""None is JAX's default device."""


def by_name(mesh: Mesh, specs: Mapping[str, Iterable[Any]]) -> Rule:
    """A rule for several devices: the first pattern (``fnmatch``) that fits a leaf's name decides.

    ``specs`` maps patterns to partitions, e.g. ``{"layers.*.[qkv]": P(None, "model")}``. What no
    pattern fits is on every device. Raises UserError for an axis that the mesh does not have, or that a
    partition has twice; the rule raises it for a leaf that its partition does not divide.
    """
    known = set(mesh.axis_names)
    for pattern, spec in specs.items():
        axes = _axes(spec)
        if len(set(axes)) < len(axes):
            raise UserError(f"{pattern}: the partition has an axis of the mesh twice: {axes}")
        unknown = sorted({str(axis) for axis in axes} - known)
        if unknown:
            raise UserError(
                f"{pattern}: the mesh has no axis {', '.join(unknown)}; "
                f"its axes: {', '.join(map(str, mesh.axis_names))}"
            )

    def rule(name: str, shape: tuple[int, ...]) -> Sharding:
        for pattern, spec in specs.items():
            if fnmatch.fnmatchcase(name, pattern):
                parts = [math.prod(mesh.shape[axis] for axis in _axes([each])) for each in spec]
                if len(parts) > len(shape):
                    raise UserError(
                        f"{pattern}: {name} {list(shape)} has fewer dimensions than the partition, "
                        f"which has {len(parts)}"
                    )
                if any(size % part for size, part in zip(shape, parts, strict=False)):
                    raise UserError(
                        f"{pattern}: {name} {list(shape)} does not divide into {parts} parts"
                    )
                return NamedSharding(mesh, PartitionSpec(*spec))
        return NamedSharding(mesh, PartitionSpec())

    return rule


def place_of(placement: Placement, name: str, shape: tuple[int, ...]) -> Sharding:
    """The sharding of one leaf."""
    if callable(placement):
        placement = placement(name, shape)
    if isinstance(placement, Sharding):
        return placement
    return SingleDeviceSharding(placement or _default_device())


def device_of(sharding: Sharding) -> jax.Device:
    """One of a sharding's devices: they are of one kind."""
    devices: set[Any] = sharding.device_set
    first: jax.Device = min(devices, key=lambda device: device.id)
    return first


def _default_device() -> jax.Device:
    chosen: Any = jax.config.values["jax_default_device"]
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return chosen or jax.local_devices()[0]


def _axes(spec: Iterable[Any]) -> list[Any]:
    """The mesh axes of a partition, whose entries are names, tuples of names, or None."""
    return [
        axis
        for entry in spec
        if entry is not None
        for axis in (entry if isinstance(entry, tuple) else (entry,))
    ]
