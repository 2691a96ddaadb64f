"""Packed masks and NumPy's own reading of them."""

import numpy as np

TILE = 64
"""Tokens of a tile of the masked head's GPU kernel."""
SECTOR_BYTES = 32
"""What a GPU's memory moves at least."""

KINDS = ("half", "1 %", "all")


def pack(legal: np.ndarray) -> np.ndarray:
    """bool ``[..., V]`` to int32 words ``[..., ceil(V / 32)]``, bit ``t & 31`` of word ``t >> 5``."""
    missing = -legal.shape[-1] % 32
    padded = np.pad(legal, [(0, 0)] * (legal.ndim - 1) + [(0, missing)])
    packed = np.packbits(padded, axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view("<i4").astype(np.int32)


def unpack(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """int32 ``[..., W]`` to bool ``[..., V]``; what lies beyond V is dropped."""
    words = np.ascontiguousarray(words.astype("<i4"))
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    return bits[..., :vocab_size].astype(bool)


def legal_tokens(kind: str, rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """bool ``[rows, V]``: ``half`` of the tokens at random places, ``1 %`` of them, or ``all``."""
    share = {"half": 0.5, "1 %": 0.01, "all": 1.0}[kind]
    return np.random.default_rng(seed).random((rows, vocab_size)) < share


def legal_in_tiles(active: int, rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """bool ``[rows, V]``: half of the tokens of ``active`` tiles, the same tiles in every row."""
    rng = np.random.default_rng(seed)
    tiles = -(-vocab_size // TILE)
    chosen = np.zeros(tiles, bool)
    chosen[rng.choice(tiles, size=min(active, tiles), replace=False)] = True
    legal: np.ndarray = rng.random((rows, vocab_size)) < 0.5
    return legal & chosen.repeat(TILE)[:vocab_size]


def masked_sectors(legal: np.ndarray, itemsize: int) -> int:
    """Sectors of the logits ``[rows, V]`` in which some token is masked: what a store really moves."""
    per_sector = SECTOR_BYTES // itemsize
    flat = ~legal.reshape(-1)
    padded = np.pad(flat, (0, -flat.size % per_sector))
    return int(padded.reshape(-1, per_sector).any(axis=1).sum())
