"""Products with a matrix whose weights are int8: a quarter of float32's bytes to read."""

from pallas_kernels.int8_matmul.api import Int8Matrix, int8_matmul, quantize

__all__ = ["Int8Matrix", "int8_matmul", "quantize"]
