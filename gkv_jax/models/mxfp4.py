"""MXFP4 tensors, as gpt-oss checkpoints have them: 4-bit floats in blocks of 32 with one scale.

A tensor ``X`` is stored as ``X_blocks``, uint8 ``[..., out, in / 32, 16]``, two E2M1 numbers a byte
with the first in the low half, and ``X_scales``, uint8 ``[..., out, in / 32]``: exponents of two,
biased by 127 (OCP Microscaling Formats 1.0). Every such number is a bfloat16, exactly, but for those
beyond its range, from 2^128 on.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from gkv_jax.errors import UserError

BLOCKS, SCALES = "_blocks", "_scales"

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])  # the sign is the highest bit
_NOT_A_NUMBER = 255
_ALWAYS_FINITE = 252  # scales up to this one: 6 * 2^(252 - 127) is below 2^128
_ROWS = 64  # transposed at a time: what fits the processor's cache


@functools.cache
def _pairs() -> np.ndarray:
    """The two bfloat16 numbers of a byte under a scale, ``[scale * 256 + byte]``, in one uint32 each.

    So dequantising is looking up, and no number is computed twice.
    """
    with np.errstate(over="ignore"):
        numbers = np.ldexp(_E2M1[None, :], (np.arange(256) - 127)[:, None])
        numbers = numbers.astype(ml_dtypes.bfloat16)
    byte = np.arange(256)
    pairs = np.stack([numbers[:, byte & 15], numbers[:, byte >> 4]], axis=-1)
    return pairs.reshape(-1).view(np.uint32)


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """``[E, out, in / 32, 16]`` and ``[E, out, in / 32]`` to bfloat16 ``[E, in, out]``."""
    experts, out = blocks.shape[:2]
    whole = np.empty((experts, blocks[0, 0].size * 2, out), np.uint16)
    for expert in range(experts):  # so that no more than one is held twice
        index = scales[expert, ..., None].astype(np.uint16) << 8 | blocks[expert]
        rows = _pairs()[index].view(np.uint16).reshape(out, -1)
        for start in range(0, out, _ROWS):
            whole[expert, :, start : start + _ROWS] = rows[start : start + _ROWS].T
    return whole.view(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Mxfp4Checkpoint(Mapping[str, np.ndarray]):
    """A checkpoint whose MXFP4 pairs appear as bfloat16 tensors ``[E, in, out]``, made when read.

    Tensors that are not stored so are passed through. Raises UserError, when a pair is read, if one
    half is missing or they do not fit each other.
    """

    stored: Mapping[str, np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self.stored:
            return self.stored[name]
        halves = name + BLOCKS, name + SCALES
        absent = [half for half in halves if half not in self.stored]
        if len(absent) == 2:
            raise KeyError(name)
        if absent:
            raise UserError(f"tensor {absent[0]} is missing; the checkpoint is incomplete")
        blocks, scales = (self.stored[half] for half in halves)
        if (
            blocks.dtype != np.uint8
            or scales.dtype != np.uint8
            or blocks.ndim != 4
            or blocks.shape[-1] != 16
            or blocks.shape[:-1] != scales.shape
        ):
            raise UserError(
                f"tensor {name} is no MXFP4: {BLOCKS} {blocks.dtype.name} {list(blocks.shape)}, "
                f"{SCALES} {scales.dtype.name} {list(scales.shape)}; expected uint8 "
                "[E, out, in / 32, 16] and [E, out, in / 32]"
            )
        tensor = dequantize(blocks, scales)
        large = (scales > _ALWAYS_FINITE).any(axis=(1, 2))  # of experts; none, in a sound file
        finite = np.isfinite(tensor[large].astype(np.float32)).all()
        if not finite or (scales == _NOT_A_NUMBER).any():
            raise UserError(f"tensor {name} has numbers that are not finite; it is damaged")
        return tensor

    def __iter__(self) -> Iterator[str]:
        # A lone half shows under the pair's name; reading it says what is missing.
        names = (name.removesuffix(BLOCKS).removesuffix(SCALES) for name in self.stored)
        return iter(dict.fromkeys(names))

    def __len__(self) -> int:
        return sum(1 for _ in self)
