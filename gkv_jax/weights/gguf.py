"""GGUF files (llama.cpp): configuration and weights, dequantised on the host.

The ``gguf`` package reads and dequantises them; the tokenizer that the same file carries is in
:mod:`gkv_jax.weights.gguf_tokenizer`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gkv_jax.errors import UserError
from gkv_jax.models.config import Llama3Scaling, ModelConfig

_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class GGUFCheckpoint(Mapping[str, np.ndarray]):
    """An open GGUF file: a mapping from its tensor names to float32 arrays ``[out, in]``.

    A tensor is dequantised each time it is looked up. Rows of ``attn_q`` and ``attn_k`` come back
    in Hugging Face head order.
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
        return cls(path, metadata, {tensor.name: tensor for tensor in reader.tensors})

    @cached_property
    def config(self) -> ModelConfig:
        names = self._tensors.keys()
        scaling = None
        if _ROPE_FACTORS in names:
            plain = ModelConfig.from_gguf(self.metadata, names)
            scaling = llama3_scaling(self._dequantise(_ROPE_FACTORS), plain.rope.theta)
        return ModelConfig.from_gguf(self.metadata, names, scaling)

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._dequantise(name)
        if name.startswith("blk.") and name.split(".")[2] in ("attn_q", "attn_k"):
            heads = self.config.num_heads if ".attn_q." in name else self.config.num_kv_heads
            if array.shape[0] != heads * self.config.head_dim:
                raise UserError(
                    f"{self.path}: tensor {name} has {array.shape[0]} rows, which are not "
                    f"{heads} heads of {self.config.head_dim}"
                )
            return unpermute_rows(array, heads)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _dequantise(self, name: str) -> np.ndarray:
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            array = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UserError(
                f"{self.path}: tensor {name} has the quantisation {tensor.tensor_type.name}, which "
                "the gguf package cannot dequantise; take another file of this model"
            ) from error
        # float32 comes back as a view of the mapped file, which the array must outlive.
        return np.array(array) if np.may_share_memory(array, tensor.data) else np.asarray(array)


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


def unpermute_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of ``attn_q`` and ``attn_k``: ``[heads * D, ...]`` float32.

    Its converter interleaves the two halves of each head, (0, D/2, 1, D/2 + 1, ...), because its
    rotary embedding turns neighbouring rows; Hugging Face's turns row i with row i + D/2.
    """
    rows, *rest = array.shape
    pairs = rows // heads // 2
    halves = array.reshape(heads, pairs, 2, *rest).swapaxes(1, 2)
    return np.ascontiguousarray(halves, dtype=np.float32).reshape(rows, *rest)


def llama3_scaling(factors: np.ndarray, theta: float) -> Llama3Scaling:
    """The scaling whose divisors per frequency are ``factors``, float32 ``[D/2]``.

    GGUF keeps only the divisors. Every published Llama 3 model has low_freq_factor 1,
    high_freq_factor 4 and 8192 original positions, so only the factor is unknown, and the divisors
    tell whether that holds. Raises UserError when it does not.
    """
    scaling = Llama3Scaling(float(factors.max()), 1.0, 4.0, 8192)
    pairs = factors.shape[0]
    wavelengths = 2 * math.pi * theta ** (np.arange(pairs, dtype=np.float64) / pairs)
    turns = scaling.original_max_position_embeddings / wavelengths
    smooth = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / scaling.factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-4, atol=0.0):
        raise UserError(
            "GGUF: rope_freqs.weight is not the scaling of Llama 3; "
            "load the model from its Hugging Face folder"
        )
    return scaling
