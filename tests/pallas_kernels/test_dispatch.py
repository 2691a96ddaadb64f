"""Which implementation runs where, with the bitmask's modules standing for every kernel's."""

import importlib
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.bitmask import apply_token_bitmask


@pytest.fixture(autouse=True)
def _nothing_said_or_loaded_before():
    caches = dispatch.load, dispatch._say_once
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def on(monkeypatch):
    """Makes a device with these attributes the first one."""

    def first_device(**attributes):
        device = SimpleNamespace(**{"device_kind": "of no known kind", **attributes})
        monkeypatch.setattr(jax, "devices", lambda: [device])

    return first_device


def choose(dtype="float32", implementation=None):
    """The name of the module chosen for logits of `dtype`."""
    module = dispatch.choose(
        "bitmask", implementation, lambda module: module.unsupported(jnp.dtype(dtype))
    )
    return module.__name__.removeprefix("pallas_kernels.bitmask.")


@pytest.mark.parametrize(
    ("device", "dtype", "chosen"),
    [
        ({"platform": "cpu", "device_kind": "cpu"}, "float32", "xla"),
        ({"platform": "tpu", "device_kind": "TPU v4"}, "float32", "mosaic_tpu"),
        ({"platform": "tpu", "device_kind": "TPU v5 lite"}, "bfloat16", "mosaic_tpu"),
        ({"platform": "tpu", "device_kind": "TPU v5 lite"}, "float16", "xla"),
        ({"platform": "tpu", "device_kind": "TPU v2"}, "float32", "xla"),
        ({"platform": "tpu", "device_kind": "TPU v3"}, "float32", "xla"),
        ({"platform": "gpu", "compute_capability": "8.0"}, "float32", "triton"),
        ({"platform": "gpu", "compute_capability": "9.0"}, "float16", "triton"),
        ({"platform": "gpu", "compute_capability": "12.0"}, "float32", "triton"),
        ({"platform": "gpu", "compute_capability": "7.5"}, "float32", "xla"),
        ({"platform": "gpu", "compute_capability": "gfx942"}, "float32", "xla"),
        ({"platform": "gpu"}, "float32", "xla"),
        ({"platform": "metal"}, "float32", "xla"),
    ],
    ids=str,
)
def test_by_device_and_dtype(on, device, dtype, chosen):
    on(**device)
    assert choose(dtype) == chosen


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        (
            {"platform": "gpu", "device_kind": "Tesla T4", "compute_capability": "7.5"},
            "float32",
            "bitmask: triton does not run on Tesla T4; plain XLA runs instead",
        ),
        (
            {"platform": "tpu", "device_kind": "TPU v3"},
            "float32",
            "bitmask: mosaic_tpu does not run on TPU v3; plain XLA runs instead",
        ),
        (
            {"platform": "tpu", "device_kind": "TPU v6 lite"},
            "float16",
            "bitmask: mosaic_tpu does not take float16 logits; plain XLA runs instead",
        ),
        (
            {"platform": "metal"},
            "float32",
            "bitmask: metal has no kernel of its own; plain XLA runs instead",
        ),
    ],
    ids=["gpu", "tpu", "dtype", "platform"],
)
def test_falling_back_to_xla_is_said_once(on, caplog, device, dtype, message):
    on(**device)
    with caplog.at_level(logging.INFO, dispatch.__name__):
        assert [choose(dtype) for _ in range(3)] == ["xla"] * 3
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("INFO", message)]


def test_an_unknown_device_masks_through_xla(on, caplog):
    on(platform="gpu", device_kind="Unheard-of 1")
    logits = np.zeros((1, 32), np.float32)
    with caplog.at_level(logging.INFO, dispatch.__name__):
        masked = apply_token_bitmask(logits, np.asarray([[5]], np.int32), np.ones(1, np.int32))
    assert np.flatnonzero(np.asarray(masked)[0] == 0).tolist() == [0, 2]
    assert "does not run on Unheard-of 1" in caplog.text


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_nothing_is_said_where_nothing_is_missing(on, caplog, platform):
    on(platform=platform, device_kind="TPU v5p" if platform == "tpu" else "cpu")
    with caplog.at_level(logging.DEBUG, dispatch.__name__):
        choose()
    assert not caplog.records


def test_a_backend_that_cannot_be_imported_is_passed_over(on, caplog, monkeypatch):
    real = importlib.import_module

    def without_triton(name, *args):
        if name.endswith(".triton"):
            raise ImportError("no Triton in this jaxlib")
        return real(name, *args)

    on(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")
    monkeypatch.setattr(importlib, "import_module", without_triton)
    with caplog.at_level(logging.INFO, dispatch.__name__):
        assert choose() == "xla"
    assert "triton cannot be imported (no Triton in this jaxlib)" in caplog.text
    with pytest.raises(ImportError, match="no Triton"):
        choose(implementation="triton")


@pytest.mark.parametrize("implementation", dispatch.IMPLEMENTATIONS)
def test_a_named_implementation_is_taken_on_any_device(on, implementation):
    on(platform="cpu", device_kind="cpu")
    assert choose("bfloat16", implementation) == implementation


def test_a_named_implementation_is_not_replaced():
    message = "^implementation: 'mosaic_tpu' does not take float16 logits$"
    with pytest.raises(ValueError, match=message):
        choose("float16", "mosaic_tpu")


@pytest.mark.parametrize("unknown", ["cuda", "", "XLA"])
def test_an_unknown_name_is_refused(unknown):
    with pytest.raises(ValueError, match=r"^implementation: must be one of xla, mosaic_tpu"):
        choose("float32", unknown)
