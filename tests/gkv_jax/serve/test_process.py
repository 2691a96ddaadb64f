"""The whole program, as users start it: a real model, a real process, signals."""

import asyncio
import concurrent.futures
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import uvicorn

from gkv_jax.serve import process as process_module

ROOT = Path(__file__).parents[3]
MODEL = "smollm2-135m-instruct"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable, "-m", "gkv_jax.serve", "--model", MODEL, "--port", "0",
        "--slots", "4", "--window", "252",
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        timer = threading.Timer(300, running.kill)
        timer.start()
        try:
            yield running
        finally:
            timer.cancel()
            running.kill()


def test_waiting_for_the_engine_to_close_does_not_stop_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long prefill keeps ``Engine.close`` waiting; answers go on meanwhile."""
    closing, answered = threading.Event(), threading.Event()
    in_time: list[bool] = []

    class Busy:
        def close(self) -> None:
            closing.set()
            in_time.append(answered.wait(5))

    async def answer(*_: Any) -> None:
        while not closing.is_set():
            await asyncio.sleep(0.01)
        answered.set()

    monkeypatch.setattr(uvicorn.Server, "shutdown", answer)
    monkeypatch.setattr(process_module, "GRACE_S", 0)
    server = process_module._Server(uvicorn.Config(lambda: None), Busy())  # type: ignore[arg-type]
    asyncio.run(server.shutdown())
    assert in_time == [True]


@pytest.mark.model
def test_serves_a_real_model_until_sigterm(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    announced = process.stdout.readline()
    assert announced.startswith(f"serving {MODEL} at http://127.0.0.1:")
    url = announced.split()[-1]

    with openai.OpenAI(base_url=url, api_key="none", timeout=60) as client:

        def describe(seed: int) -> Any:
            return client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Describe a person from Lisbon as JSON."}],
                max_tokens=100,
                seed=seed,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "person", "strict": True, "schema": PERSON},
                },
            )

        with concurrent.futures.ThreadPoolExecutor() as pool:
            answers = list(pool.map(describe, range(6)))
        for answer in answers:
            assert answer.choices[0].finish_reason == "stop"
            jsonschema.validate(json.loads(answer.choices[0].message.content), PERSON)
            assert answer.gkv["backend"] == "llguidance"

        greedy = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=20,
        )
        assert "Paris" in greedy.choices[0].message.content

    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert "Traceback" not in log
