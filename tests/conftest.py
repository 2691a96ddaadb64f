"""Strict numerics for every test: silent dtype or rank promotion is an error, and so is a warning."""

import os

# Before JAX exists: tests run on the CPU, and tokenizers must not fork under JAX's threads.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # libtpu compiles without looking for a TPU

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
