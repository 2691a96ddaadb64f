"""The packed mask format, defined once for all implementations: its words and its masked value.

A row of a mask holds `num_words(V)` int32 words. Token `t` is bit `t & 31` (counted from the least
significant) of word `t >> 5`, and 1 means allowed. This is the format that XGrammar and LLGuidance
fill. Bits at and beyond V are never looked at.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike

BITS_PER_WORD = 32


def num_words(vocab_size: int) -> int:
    """The number W of int32 words that hold one bit for each of `vocab_size` tokens."""
    return -(-vocab_size // BITS_PER_WORD)


def masked_logit(dtype: DTypeLike) -> float:
    """The logit given to a token that is not allowed: the lowest finite value of `dtype`.

    It is finite, so that a row without any allowed token goes through softmax and top-p as a
    uniform row; with −inf it would become NaN and spread from there.
    """
    return float(jnp.finfo(dtype).min)
