"""GGUF files (llama.cpp): architecture and weights, dequantised on the host.

The ``gguf`` package reads and dequantises them; the tokenizer that the same file carries is in
:mod:`gkv_jax.weights.gguf_tokenizer`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gkv_jax.errors import UserError
from gkv_jax.models import families
from gkv_jax.models.config import GGUFHeader
from gkv_jax.models.fields import Fields
from gkv_jax.models.transformer import Transformer

_ROPE_FACTORS = "rope_freqs.weight"
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class GGUFCheckpoint(Mapping[str, np.ndarray]):
    """An open GGUF file: a mapping from its tensor names to float32 arrays ``[out, in]``.

    A tensor is dequantised each time it is looked up.
    """

    path: Path
    metadata: dict[str, Any]
    """Values of the file's fields as Python objects, arrays as lists."""
    _tensors: dict[str, Any]
    """``gguf.ReaderTensor`` by name; their data are views of the mapped file."""

    @classmethod
    def open(cls, path: Path) -> "GGUFCheckpoint":
        """Read the header. Raises UserError unless the file is a whole GGUF file."""
        try:
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise UserError(f"{path} is not a GGUF file (it does not start with GGUF)")
            reader = _reader(path)
            metadata = {
                name: field.contents()
                for name, field in reader.fields.items()
                if not name.startswith("GGUF.")  # counts that the reader adds
            }
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from error
        except UserError:
            raise
        except Exception as error:
            # The reader trusts the file: whatever NumPy makes of a wrong offset or count comes out.
            raise UserError(
                f"{path} is truncated or damaged ({' '.join(str(error).split())}); "
                "download the file again"
            ) from error
        _check_kind(Fields(metadata, f"{path}: "))
        return cls(path, metadata, {tensor.name: tensor for tensor in reader.tensors})

    @cached_property
    def header(self) -> GGUFHeader:
        """What it says beside the weights."""
        factors = self[_ROPE_FACTORS] if _ROPE_FACTORS in self._tensors else None
        return GGUFHeader(self.metadata, self._tensors.keys(), factors)

    @cached_property
    def model(self) -> Transformer:
        """The architecture. Raises UserError for one that is not served."""
        return families.from_gguf(self.header)

    def __getitem__(self, name: str) -> np.ndarray:
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            return _in_blocks(tensor.data, lambda rows: dequantize(rows, tensor.tensor_type))
        except NotImplementedError as error:
            raise UserError(
                f"{self.path}: tensor {name} has the quantisation {tensor.tensor_type.name}, which "
                "the gguf package cannot dequantise; take another file of this model"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _check_kind(fields: Fields) -> None:
    """Raise UserError, naming the key, unless the file is a model, and the whole of it."""
    if (parts := fields.integer("split.count", 1)) > 1:
        raise UserError(
            f"{fields.where}split.count={parts}: a file of several is not read; join them with "
            "llama.cpp's llama-gguf-split --merge, or load the model from its Hugging Face folder"
        )
    if (kind := fields.text("general.type", "model")) != "model":
        raise UserError(
            f"{fields.where}general.type={kind!r} is no model but something to put beside one; "
            "give the model's own file"
        )


def _in_blocks(data: np.ndarray, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """``function`` of all rows, some at a time: it needs several times the memory of its result."""
    first = np.asarray(function(data[:1]))
    out = np.empty((len(data), *first.shape[1:]), first.dtype)
    step = max(1, _BLOCK_BYTES // max(first.nbytes, 1))
    for row in range(0, len(data), step):
        out[row : row + step] = function(data[row : row + step])
    return out


def _reader(path: Path) -> Any:
    """A ``gguf.GGUFReader`` that takes a second for a vocabulary, not four.

    The package's slices ``numpy.memmap`` a million times, and each slice of one is a Python call.
    """
    from gguf import GGUFReader

    class Reader(GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            plain = value.view(np.ndarray) if isinstance(value, np.memmap) else value
            super().__setattr__(name, plain)

    return Reader(path)
