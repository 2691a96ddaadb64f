"""Attention of a few new tokens over a cache whose slots lie in no particular order.

Import `decode_attention` from here; the modules beside it hold one implementation each and are
imported only when they are used.
"""

from pallas_kernels.decode_attention.api import LOWEST, Attended, decode_attention

__all__ = ["LOWEST", "Attended", "decode_attention"]
