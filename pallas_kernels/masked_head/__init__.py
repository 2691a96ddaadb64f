"""The LM head, read only where some row has a legal token, fused with the sampler."""

from pallas_kernels.masked_head.api import HeadSample, masked_head, project

__all__ = ["HeadSample", "masked_head", "project"]
