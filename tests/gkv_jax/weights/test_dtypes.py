"""The dtype of weights that nobody asks a dtype for, by device and family."""

import logging
import re
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from gkv_jax import CacheSpec, Engine, Guide, Sampling
from gkv_jax.models.gemma import Gemma
from gkv_jax.models.gpt_oss import GptOss
from gkv_jax.models.llama import Llama
from gkv_jax.weights import dtypes
from gkv_jax.weights.dtypes import default_dtype
from gkv_jax.weights.registry import load_model

T4 = {"platform": "gpu", "device_kind": "Tesla T4", "compute_capability": "7.5"}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a device with these attributes the first one."""

    def first_device(**attributes: str) -> None:
        device = SimpleNamespace(**{"device_kind": "of no known kind", **attributes})
        monkeypatch.setattr(jax, "devices", lambda: [device])

    dtypes._say_once.cache_clear()
    return first_device


@pytest.mark.parametrize(
    ("device", "family", "dtype"),
    [
        ({"platform": "cpu", "device_kind": "cpu"}, Llama, "float32"),
        ({"platform": "tpu", "device_kind": "TPU v5 lite"}, Llama, "bfloat16"),
        ({"platform": "gpu", "compute_capability": "8.0"}, Llama, "bfloat16"),
        ({"platform": "gpu", "compute_capability": "12.0"}, Gemma, "bfloat16"),
        ({"platform": "gpu", "compute_capability": "gfx942"}, Llama, "bfloat16"),
        ({"platform": "gpu", "compute_capability": "7.0"}, Llama, "float16"),
        (T4, Llama, "float16"),
        (T4, Gemma, "float32"),
        (T4, GptOss, "float32"),
    ],
    ids=str,
)
def test_by_device_and_family(on: Any, device: dict[str, str], family: Any, dtype: str) -> None:
    on(**device)
    assert default_dtype(family) == dtype


def test_on_a_t4_it_is_said_once(on: Any, caplog: pytest.LogCaptureFixture) -> None:
    on(**T4)
    with caplog.at_level(logging.INFO, dtypes.__name__):
        assert [default_dtype(Llama) for _ in range(3)] == ["float16"] * 3
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == "Tesla T4 has no bfloat16 arithmetic; Llama takes float16"


def test_a_t4_loads_float16_and_generates_under_a_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic is this machine's, the dtype that of a T4."""
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", lambda: [SimpleNamespace(**T4)])
        loaded = load_model("tiny-random", None)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {"float16"}
    with Engine(
        loaded.model, loaded.params, loaded.tokenizer, cache=CacheSpec(window=60), slots=2
    ) as engine:
        assert engine.dtype == np.float16
        (result,) = engine.generate(
            ["A date: "], guide=Guide.regex(r"\d{4}-\d\d-\d\d"), sampling=Sampling(max_tokens=20)
        )
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result.text)
    assert result.finish_reason == "stop"
