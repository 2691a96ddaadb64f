"""The ASGI application: the routes, and what stands before them."""

import hashlib
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import jaxlib
from fastapi import FastAPI

import gkv_jax
from gkv_jax.engine import Engine
from gkv_jax.serve.errors import install_handlers
from gkv_jax.serve.metrics import Gauges, Metrics
from gkv_jax.serve.page import route as page
from gkv_jax.serve.routes import facts, generate, responses
from gkv_jax.serve.service import Admission, Service
from gkv_jax.serve.settings import Chat, Limits


def create_app(
    engine: Engine,
    *,
    model: str,
    limits: Limits | None = None,
    queue_size: int = 256,
    chat: Chat | None = None,
    is_ready: Callable[[], bool] = lambda: True,
) -> FastAPI:
    """The application.

    Args:
      engine: does the work; whoever made it closes it.
      model: what clients call the model.
      limits: how much one request may ask for; ``Limits()`` if None.
      queue_size: answers that may wait for a slot; more get HTTP 429.
      chat: how chats are read and told; ``Chat()`` if None.
      is_ready: whether ``/ready`` shall say so.

    Returns:
      The application; its ``state.metrics`` are what ``/metrics`` tells.

    Raises:
      UserError: ``chat`` sets what the engine's chat template does not read.
    """
    gauges = Gauges(
        model=model,
        slots=engine.slots,
        cache_bytes=engine.cache_bytes,
        queued=lambda: engine.queued,
        active=lambda: engine.active,
    )
    service = Service(
        engine,
        model,
        limits or Limits(),
        Metrics(gauges),
        Admission(engine.slots, queue_size),
        chat or Chat(),
    )
    # The pages for /docs and /redoc would come from elsewhere; /openapi.json is here.
    app = _App(title="gkv_jax", version=gkv_jax.__version__, docs_url=None, redoc_url=None)
    app.state.metrics = service.metrics
    install_handlers(app)
    fingerprint = _fingerprint(engine, model)
    generate.add(app, service, fingerprint)
    responses.add(app, service, fingerprint)
    facts.add(app, service, int(time.time()), is_ready)
    page.mount(app)
    return app


class _App(FastAPI):
    """Describes its routes without FastAPI's own kind of validation error, which nobody gets."""

    def openapi(self) -> dict[str, Any]:
        """What ``/openapi.json`` says."""
        schema = super().openapi()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return schema


def _fingerprint(engine: Engine, model: str) -> str:
    """Changes with whatever changes the compiled programs, whose rounding may decide a close call.

    The weights are known by the model's name only.
    """
    device = jax.devices()[0]
    software = (gkv_jax.__version__, jax.__version__, jaxlib.__version__)
    options = (os.environ.get("XLA_FLAGS"), jax.config.values["jax_default_matmul_precision"])
    machine = (device.platform, device.device_kind, platform.machine(), os.cpu_count())
    setup = (model, engine.shapes, engine.spec, engine.slots, engine.loop)
    parts = (software, options, machine, setup)
    return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]
