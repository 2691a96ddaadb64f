"""Log lines: what is in them, in both formats, in a process of its own."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PROGRAM = """
import logging, sys, warnings
from gkv_jax.serve.logs import configure
from gkv_jax.serve.settings import Log
configure(Log(format=sys.argv[1], level=sys.argv[2]))
serve = logging.getLogger("gkv_jax.serve")
serve.debug("small")
serve.info("method=GET", extra={"method": "GET", "seconds": 0.5})
logging.getLogger("uvicorn.error").info("up", extra={"color_message": "UP"})
logging.getLogger("uvicorn.access").info("twice")
logging.getLogger("other").info("chatter")
logging.getLogger("other").warning("trouble")
warnings.warn("odd")
try:
    1 / 0
except ZeroDivisionError:
    serve.exception("failed")
"""


def lines_of(log_format: str, level: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, log_format, level]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert ended.stdout == ""
    return ended.stderr.splitlines()


def test_json_is_one_object_per_line() -> None:
    lines = [json.loads(line) for line in lines_of("json", "info")]
    messages = [line["message"] for line in lines]
    assert messages[:3] == ["method=GET", "up", "trouble"]
    assert "odd" in messages[3]
    assert messages[4:] == ["failed"]
    request, uvicorn, *_, failed = lines
    assert request.keys() == {"time", "level", "logger", "message", "method", "seconds"}
    assert (request["level"], request["logger"]) == ("INFO", "gkv_jax.serve")
    assert (request["method"], request["seconds"]) == ("GET", 0.5)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", request["time"])
    assert uvicorn.keys() == {"time", "level", "logger", "message"}
    assert "ZeroDivisionError" in failed["exc_info"]


def test_text_is_for_people() -> None:
    lines = lines_of("text", "info")
    assert re.fullmatch(r"[-\d]+ [:,\d]+ INFO gkv_jax.serve: method=GET", lines[0])
    assert "Traceback (most recent call last):" in lines
    assert not any("twice" in line or "chatter" in line for line in lines)


@pytest.mark.parametrize(("level", "first"), [("debug", "small"), ("warning", "trouble")])
def test_level_is_the_least_that_is_written(level: str, first: str) -> None:
    assert lines_of("text", level)[0].endswith(f": {first}")
