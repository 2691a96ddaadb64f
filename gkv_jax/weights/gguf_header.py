"""The header of a GGUF file (versions 2 and 3, little-endian): metadata and the places of tensors.

The ``gguf`` package's own reader makes NumPy arrays of every string of the vocabulary, which takes
two seconds for 49 thousand tokens, and answers a cut file with an IndexError. The format is small:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gkv_jax.errors import UserError

# Value types of the format: number -> struct code. Strings and arrays are read by hand.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class TensorPlace:
    """A stored tensor: ``shape`` is ``[out, in]``, ``ggml_type`` the number of its block format.

    Its data are ``size`` bytes from byte ``offset`` of the file, rows of ``row_bytes`` bytes.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    size: int
    row_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata as Python values (arrays as lists), and the tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]


def read_header(path: Path) -> GGUFHeader:
    """Read and check a header. Raises UserError unless the file is a whole GGUF file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(f"{path} is not a GGUF file (it does not start with GGUF)")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data, 4).header(size)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except _DamagedError as error:
        raise UserError(
            f"{path} is truncated or damaged ({error}); download the file again"
        ) from error


class _DamagedError(Exception):
    """What is wrong with the file, in a few words."""


class _Cursor:
    """Reads forward through the mapped file."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data = data
        self._at = at

    def header(self, file_size: int) -> GGUFHeader:
        try:
            version, tensor_count, field_count = self._unpack("IQQ")
            if version not in _VERSIONS:
                raise _DamagedError(f"version {version}, known: 2 and 3, little-endian")
            metadata = {}
            for _ in range(field_count):
                key = self._string()
                metadata[key] = self._value(*self._unpack("I"))
            infos = [self._tensor_info() for _ in range(tensor_count)]
        except struct.error as error:
            raise _DamagedError(f"the header ends early, at byte {self._at}") from error
        except UnicodeDecodeError as error:
            raise _DamagedError(f"a name near byte {self._at} is not UTF-8") from error
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise _DamagedError(f"general.alignment is {alignment!r}")
        start = math.ceil(self._at / alignment) * alignment
        tensors = {info[0]: _place(start, file_size, *info) for info in infos}
        return GGUFHeader(metadata, tensors)

    def _unpack(self, codes: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{codes}", self._data, self._at)
        self._at += struct.calcsize(f"<{codes}")
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        end = self._at + length
        if end > len(self._data):
            raise struct.error
        text = self._data[self._at : end].decode("utf-8")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._unpack("IQ")
            # Every item takes at least a byte: a damaged count must not become a loop or a list.
            if count > len(self._data) - self._at:
                raise struct.error
            if item in _SCALARS:
                return list(self._unpack(f"{count}{_SCALARS[item]}"))
            return [self._value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise _DamagedError(f"unknown value type {kind} near byte {self._at}")
        return self._unpack(_SCALARS[kind])[0]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (rank,) = self._unpack("I")
        if not 1 <= rank <= 4:
            raise _DamagedError(f"tensor {name} has {rank} dimensions")
        # The format lists the fastest dimension first.
        shape = self._unpack(f"{rank}Q")[::-1]
        ggml_type, offset = self._unpack("IQ")
        return name, shape, ggml_type, offset


def _place(
    start: int, file_size: int, name: str, shape: tuple[int, ...], ggml_type: int, offset: int
) -> TensorPlace:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
    except (ValueError, KeyError) as error:
        raise _DamagedError(f"tensor {name} has the unknown type {ggml_type}") from error
    if shape[-1] % block:
        raise _DamagedError(f"tensor {name}: rows of {shape[-1]} are not blocks of {block}")
    row_bytes = shape[-1] // block * block_bytes
    size = math.prod(shape[:-1]) * row_bytes
    if start + offset + size > file_size:
        raise _DamagedError(
            f"tensor {name} ends at byte {start + offset + size}, the file at {file_size}"
        )
    return TensorPlace(name, shape, ggml_type, start + offset, size, row_bytes)
