"""A server that fails in the ways that the real one cannot be asked for. The prompt says how."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import fastapi
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.responses import Response

from gkv_jax.serve.page.route import mount
from tests.gkv_jax.serve.conftest import wait_for

# A token for each piece, and how many tokens the grammar allowed there; "é" comes in two parts.
PIECES = [
    ('{"', 1, "forced"), ("name", 1, "forced"), ('": "', 1, "forced"), ("Ren", 31000, "sampled"),
    ("\ufffd", 28000, "sampled"), ("\ufffd", 60, "sampled"), (" Costa", 30100, "sampled"),
    ('",\n', 900, "sampled"), (' "', 1, "forced"), ("city", 1, "forced"), ('": "', 1, "forced"),
    ("Lis", 3, "sampled"), ("bon", 1, "forced"), ('"', 1, "forced"), (",", 2, "lookup"),
    (' "age', 1, "forced"), ('": ', 1, "forced"), ("42", 110, "model"), ("}", 9, "sampled"),
]  # fmt: skip
# Another answer, behind reasoning: tokens, and what is told of each as reasoning and as answer. Tags and
# the blanks next to them are told as neither.
THOUGHT = [
    ("<think>", "", ""), ("\n", "", ""), (" Is", "Is", ""), (" caf", " caf", ""), ("\ufffd", "", ""),
    ("\ufffd", "é", ""), ("</think>", "", ""), ("\n\n", "", ""), (" Ren", "", "Ren"), ("\ufffd", "", ""),
    ("\ufffd", "", "é"), (" it", "", " it"), (" is", "", " is"),
]  # fmt: skip
ANSWER = '{"name": "René Costa",\n "city": "Lisbon", "age": 42}'
STATS = {
    "prompt_tokens": 31, "tokens": 19, "forwards": 9, "tokens_per_forward": 2.1, "tokens_per_second": 41.5,
    "drafts": {"forced": {"proposed": 10, "accepted": 10}, "lookup": {"proposed": 4, "accepted": 1}},
    "cache_bytes": 48_300_000, "grammar_us_per_token": 61.0, "compile_ms": 1.4, "evicted_tokens": 0,
    "backend": "llguidance", "exact": True,
}  # fmt: skip


def _error(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status, headers)


async def _chunks(prompt: str) -> AsyncIterator[bytes]:
    for index, (text, legal, source) in enumerate(PIECES):
        content = {4: "", 5: "é"}.get(index, text)
        trace = [{"token": 1000 + index, "text": text, "legal": legal, "source": source}]
        delta = {"role": "assistant", "content": content}
        yield _event({
            "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
            "gkv": {"position": STATS["prompt_tokens"] + index + 1, "trace": trace},
        })  # fmt: skip
        if prompt == "break" and index == 6:
            return
        await asyncio.sleep(0.05 if prompt == "slowly" else 0.005)
    for event in _end():
        yield event


async def _thoughts() -> AsyncIterator[bytes]:
    for index, (text, thought, content) in enumerate(THOUGHT):
        trace = [{"token": 1000 + index, "text": text, "legal": None, "source": "sampled"}]
        delta = {"reasoning_content": thought} if thought else {"content": content}
        yield _event({
            "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
            "gkv": {"position": STATS["prompt_tokens"] + index + 1, "trace": trace},
        })  # fmt: skip
        await asyncio.sleep(0.005)
    for event in _end():
        yield event


def _end() -> Iterator[bytes]:
    yield _event({
        "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "gkv": STATS,
    })  # fmt: skip
    yield b"data: [DONE]\n\n"


def _event(value: Any) -> bytes:
    return b": ping\r\n\r\ndata: " + json.dumps(value, ensure_ascii=False).encode() + b"\r\n\r\n"


async def _bytes(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        for byte in chunk:
            yield bytes([byte])
            await asyncio.sleep(0)


def unreliable_app() -> FastAPI:
    app = FastAPI()
    mount(app)

    @app.get("/v1/models")
    async def models() -> Any:
        cache = {
            "policy": "window",
            "sinks": 4,
            "kept": 0,
            "window": 40,
            "max_drafts": 7,
            "total": 44,
        }
        gkv = {
            "slots": 4, "cache": cache, "dtype": "bfloat16", "backends": ["llguidance", "xgrammar"],
            "limits": {"completion_tokens": 4096},
        }  # fmt: skip
        return {"object": "list", "data": [{"id": "unreliable", "object": "model", "gkv": gkv}]}

    @app.post("/v1/guide/check")
    async def check() -> Any:
        return {
            "valid": True,
            "kind": "x",
            "backend": "llguidance",
            "exact": True,
            "compile_ms": 1.26,
        }

    @app.post("/v1/chat/completions")
    async def chat(request: fastapi.Request) -> Response:
        asked = await request.json()
        prompt = asked["messages"][-1]["content"]
        if prompt == "busy":
            return _error(429, "too many requests wait", "queue_full", {"Retry-After": "3"})
        if prompt == "locked" and request.headers.get("authorization") != "Bearer open":
            return _error(401, "the API key is wrong", "invalid_api_key")
        chunks = _thoughts() if prompt == "think" else _chunks(prompt)
        return StreamingResponse(
            _bytes(chunks) if prompt == "byte by byte" else chunks, media_type="text/event-stream"
        )

    return app


@contextlib.contextmanager
def running(app: FastAPI, port: int = 0) -> Iterator[int]:
    """The application on this machine; its port."""
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", ws="none", log_level="error"))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_for(lambda: server.started)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
