"""What tests share: loading a model and compiling its loop take longer than most tests."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from gkv_jax import CacheSpec, Engine
from gkv_jax.weights.registry import LoadedModel, load_model
from tests.gkv_jax.engines import make_engine


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32."""
    return load_model("smollm2-135m-instruct", dtype="float32")


@pytest.fixture(scope="session")
def smollm2_params(smollm2: LoadedModel) -> Any:
    """Its parameters."""
    return smollm2.params


@pytest.fixture(scope="session")
def smollm2_engine(smollm2: LoadedModel, smollm2_params: Any) -> Iterator[Engine]:
    """Four slots, sinks and window, two drafts."""
    with Engine(
        smollm2.model,
        smollm2_params,
        smollm2.tokenizer,
        cache=CacheSpec(sinks=4, window=252, max_drafts=2),
        slots=4,
        stop_token_ids=smollm2.config.eos_token_ids,
    ) as engine:
        yield engine


@pytest.fixture(scope="session")
def engines() -> Iterator[Callable[[str], Engine]]:
    """The engine that tests share (``tests.gkv_jax.engines``) for each kind of loop."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda loop: stack.enter_context(make_engine(loop=loop)))


@pytest.fixture(scope="module", params=["device", "host"])
def engine(request: pytest.FixtureRequest, engines: Callable[[str], Engine]) -> Engine:
    """It, with both loops. Whoever uses it leaves it without requests and prefixes."""
    return engines(request.param)


@pytest.fixture(scope="module")
def compiles() -> Iterator[list[str]]:
    """Names of what XLA compiled since the fixture began; clear it to count from there."""
    events: list[str] = []

    def listen(name: str, _: float, **kwargs: Any) -> None:
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(str(kwargs.get("fun_name", name)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    unregister = getattr(jax.monitoring, "unregister_event_duration_listener", None)
    if (
        unregister is not None
    ):  # without it (jax 0.7) the listener stays, and nobody reads what it hears
        unregister(listen)
