"""``python -m benchmarks.gpu_check``: are the GPU kernels right on this machine, and how fast are they?

Made for a machine that nobody has seen before, without network: it needs jax, NumPy and the standard
library. What is missing besides (torch, xgrammar) is a row that says so. Every section runs in a
process of its own, so that a kernel that hangs or crashes takes its own figures with it and no more.
"""
