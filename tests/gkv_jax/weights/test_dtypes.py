"""The dtype of weights that nobody asks a dtype for, by device and family."""

import logging
import re
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gkv_jax import CacheSpec, Engine, Guide, Sampling
from gkv_jax.models.gemma import Gemma
from gkv_jax.models.gpt_oss import GptOss
from gkv_jax.models.llama import Llama
from gkv_jax.models.mistral import Mistral
from gkv_jax.models.qwen2 import Qwen2
from gkv_jax.models.qwen3 import Qwen3
from gkv_jax.weights import dtypes, registry
from gkv_jax.weights.dtypes import default_dtype
from gkv_jax.weights.registry import load_model

T4 = {"platform": "gpu", "device_kind": "Tesla T4", "compute_capability": "7.5"}


def device_with(**attributes: str) -> Any:
    return SimpleNamespace(**{"device_kind": "of no known kind", **attributes})


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
        (T4, Qwen2, "float32"),
        (T4, Qwen3, "float32"),
        (T4, Mistral, "float16"),
    ],
    ids=str,
)
def test_by_device_and_family(device: dict[str, str], family: Any, dtype: str) -> None:
    assert default_dtype(family, device_with(**device)) == dtype


def test_it_is_that_of_the_device_where_the_weights_go(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        registry, "default_dtype", lambda family, device: asked.append(device) or "bfloat16"
    )
    device = jax.devices()[0]
    mesh = Mesh(np.array([device]), ("model",))
    places = (None, device, NamedSharding(mesh, PartitionSpec()), lambda name, shape: device)
    for place in places:
        loaded = load_model("tiny-random", None, placement=place)
        assert loaded.params["embed"].dtype == "bfloat16"
    assert asked == [device] * len(places)


def test_on_a_t4_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    dtypes._say_once.cache_clear()
    with caplog.at_level(logging.INFO, dtypes.__name__):
        assert [default_dtype(Llama, device_with(**T4)) for _ in range(3)] == ["float16"] * 3
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == "Tesla T4 has no bfloat16 arithmetic; Llama takes float16"


def test_a_t4_loads_float16_and_generates_under_a_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic is this machine's, the dtype that of a T4."""
    with monkeypatch.context() as patch:
        patch.setattr(
            registry, "default_dtype", lambda family, _: default_dtype(family, device_with(**T4))
        )
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
