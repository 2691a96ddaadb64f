"""Mask, temperature, filters and the draw in one: logits and packed masks in, token ids out."""

from pallas_kernels.masked_sample.api import masked_sample
from pallas_kernels.masked_sample.rows import Rows

__all__ = ["Rows", "masked_sample"]
