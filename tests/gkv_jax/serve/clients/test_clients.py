"""Clients as their users install and run them, against one server of a tiny random model.

OpenAI's client is the one of this environment. Others want an older one, and have an environment of
their own: ``make clients``.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gkv_jax.serve.conftest import MODEL, Served

HERE = Path(__file__).parent
OTHERS = Path(sys.prefix) / "clients" / "bin" / "python"

SCRIPTS = {
    "litellm_client.py": str(OTHERS),
    "langchain_client.py": str(OTHERS),
    "instructor_client.py": str(OTHERS),
    "openai_chat.py": sys.executable,
    "openai_responses.py": sys.executable,
    "openai_async.py": sys.executable,
    "curl.sh": "sh",
}
"""From scripts to what runs them, the slowest ones first."""

Processes = dict[str, subprocess.Popen[str]]


def missing(script: str) -> str | None:
    """Why a script cannot be run here."""
    if SCRIPTS[script] == str(OTHERS) and not OTHERS.exists():
        return "the clients are not installed (`make clients`)"
    if script == "curl.sh" and shutil.which("curl") is None:
        return "curl is not installed"
    return None


@pytest.fixture(scope="module")
def running(served: Served) -> Iterator[Processes]:
    """All scripts at once: they are slow to import what they need, and the server has several slots."""
    arguments = [f"http://127.0.0.1:{served.port}/v1", MODEL]
    processes = {
        script: subprocess.Popen(
            [runner, HERE / script, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for script, runner in SCRIPTS.items()
        if missing(script) is None
    }
    try:
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


@pytest.mark.parametrize("script", SCRIPTS)
def test_client_is_served(running: Processes, script: str) -> None:
    if reason := missing(script):
        pytest.skip(reason)
    output, _ = running[script].communicate(timeout=300)
    assert running[script].returncode == 0, output
