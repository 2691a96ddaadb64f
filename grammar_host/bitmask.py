"""Token bitmasks: int32 [rows, W], W = ceil(V / 32); bit `id % 32` of word `id // 32` is 1 if the
token is legal. The layout of XGrammar, LLGuidance, vLLM and TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray


def bitmask_words(vocab_size: int) -> int:
    """W = ceil(V / 32): int32 words of one mask row."""
    return -(-vocab_size // 32)


def allocate_token_bitmask(rows: int, vocab_size: int) -> NDArray[np.int32]:
    """Mask rows that allow everything: int32 [rows, W], all bits 1."""
    return np.full((rows, bitmask_words(vocab_size)), -1, dtype=np.int32)


def token_row(token_ids: Collection[int], vocab_size: int) -> NDArray[np.int32]:
    """The mask row that allows exactly these tokens: int32 [W], read-only."""
    bits = np.zeros(bitmask_words(vocab_size) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    row = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
    row.flags.writeable = False
    return row
