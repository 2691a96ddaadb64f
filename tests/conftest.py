"""Strict numerics for every test: silent dtype or rank promotion is an error, and so is a warning."""

import gc
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

# Before JAX exists: tests run on the CPU, and tokenizers must not fork under JAX's threads.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # libtpu compiles without looking for a TPU
# Most of the time goes into compiling programs that run for a moment: half of it, for code that is slow.
# Trained models run longer than they compile; `make test` has other flags for their tests.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1",
)

import jax
import pytest
from hypothesis import HealthCheck, settings

# On a machine that does other work, too, no time is too long.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

MANY_MAPS = 20_000
"""Each compiled program takes some memory maps, of which Linux gives a process 65 530."""


@pytest.fixture(autouse=True, scope="module")
def _forget_programs() -> Iterator[None]:
    """Compiled programs are shared between test files until there are very many of them."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MANY_MAPS:
        gc.collect()
        jax.clear_caches()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with ``thinned(n)``, about one case in n is in `make test`, always the same ones."""
    for item in items:
        if (thinned := item.get_closest_marker("thinned")) is not None:
            (n,) = thinned.args
            if zlib.crc32(item.name.encode()) % n:
                item.add_marker(pytest.mark.full)
