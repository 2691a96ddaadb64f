"""The LM head, read only where some row has a legal token, fused with the sampler."""

from pallas_kernels.masked_head.api import HeadSample, masked_head, sample_active
from pallas_kernels.masked_head.project import GivenLogits, Head, SoftCapped, project

__all__ = [
    "GivenLogits",
    "Head",
    "HeadSample",
    "SoftCapped",
    "masked_head",
    "project",
    "sample_active",
]
