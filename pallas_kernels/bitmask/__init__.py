"""Packed token bitmasks applied to logits: one int32 word says which of 32 tokens a grammar allows.

Import `apply_token_bitmask` from here; the modules beside it hold one implementation each and are
imported only when they are used.
"""

from pallas_kernels.bitmask.api import apply_token_bitmask
from pallas_kernels.bitmask.packed import BITS_PER_WORD, masked_logit, num_words
from pallas_kernels.dispatch import IMPLEMENTATIONS, Implementation

__all__ = [
    "BITS_PER_WORD",
    "IMPLEMENTATIONS",
    "Implementation",
    "apply_token_bitmask",
    "masked_logit",
    "num_words",
]
