"""Leaves of a parameter tree, and what checkpoints call them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

Naming = Literal["huggingface", "gguf"]


@dataclass(frozen=True)
class Parameter:
    """One leaf of the tree, and its names elsewhere.

    Attributes:
      name: its key in the tree, or in its layer of ``tree["layers"]``.
      layer: index of the layer; None outside the layers.
      huggingface, gguf: its names in checkpoints of either kind.
      shape: as checkpoints store it.
      linear: whether it is a linear map, stored ``[out, in]`` and ``[in, out]`` in the tree.
    """

    name: str
    layer: int | None
    huggingface: str
    gguf: str
    shape: tuple[int, ...]
    linear: bool = False

    @property
    def path(self) -> str:
        """Its place in the tree: ``embed``, ``layers.3.q``."""
        return self.name if self.layer is None else f"layers.{self.layer}.{self.name}"

    def key(self, naming: Naming) -> str:
        """Its name in a checkpoint."""
        return self.huggingface if naming == "huggingface" else self.gguf

    @property
    def tree_shape(self) -> tuple[int, ...]:
        """Its shape in the tree."""
        return self.shape[::-1] if self.linear else self.shape


def module(
    layer: int, name: str, huggingface: str, gguf: str, shape: tuple[int, ...], bias: bool = False
) -> Iterator[Parameter]:
    """The weight of one module of a layer, linear if ``[out, in]``, and its bias ``[out]``, if any."""
    theirs, llama_cpps = f"model.layers.{layer}.{huggingface}", f"blk.{layer}.{gguf}"
    matrix = len(shape) == 2
    yield Parameter(name, layer, f"{theirs}.weight", f"{llama_cpps}.weight", shape, linear=matrix)
    if bias:
        yield Parameter(f"{name}_bias", layer, f"{theirs}.bias", f"{llama_cpps}.bias", shape[:1])


@dataclass(frozen=True)
class Changed(Mapping[str, np.ndarray]):
    """``tensors``, each changed when it is looked up: ``change(name, array)``."""

    tensors: Mapping[str, np.ndarray]
    change: Callable[[str, np.ndarray], np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.change(name, self.tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class Renamed(Mapping[str, np.ndarray]):
    """``tensors`` under the names that ``rename`` gives them, without those that it makes None."""

    def __init__(
        self, tensors: Mapping[str, np.ndarray], rename: Callable[[str], str | None]
    ) -> None:
        self._tensors = tensors
        self._theirs = {ours: name for name in tensors if (ours := rename(name)) is not None}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors[self._theirs[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._theirs)

    def __len__(self) -> int:
        return len(self._theirs)
