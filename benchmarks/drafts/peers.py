"""Peers in processes of their own: transformers with XGrammar, and llama.cpp.

Both read the same prompt tokens and answer one document after another: neither is asked to batch.
Grammars are compiled before the clock starts, as ours are.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.drafts.documents import Answer, Document, Way
from gkv_jax import UserError

TRANSFORMERS = "transformers"
LLAMA_CPP = "llama.cpp"

_PATIENCE_S = 300.0
"""A document that takes longer is given up: some grammars never end."""


class Peer(Way):
    """An engine in another process.

    A document whose process dies or takes too long is an error; the next one has a new process.
    """

    def __init__(self, command: Sequence[str | Path]) -> None:
        """``command`` starts something that speaks as ``serving`` says."""
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self.versions: dict[str, str] = {}

    def answer(self, documents: Sequence[Document], max_tokens: int) -> list[Answer]:
        """Raises UserError if the process does not start; it says why."""
        return [self._answer(document, max_tokens) for document in documents]

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _answer(self, document: Document, max_tokens: int) -> Answer:
        process = self._process or self._start()
        request = {
            "prompt": document.prompt, "schema": document.schema, "max_tokens": max_tokens
        }  # fmt: skip
        value = _ask(process, json.dumps(request))
        if value is None:
            self._end()
            return Answer(error="the process died, or took too long")
        return Answer(**value, spent=value.get("seconds", 0.0))

    def _start(self) -> "subprocess.Popen[str]":
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
            self._process = process
            hello = _ask(process, None)
            if hello is None:
                self._end()
                errors.seek(0)
                raise UserError(f"{self._command[0]} did not start:\n{errors.read()[-2000:]}")
        self.versions = hello["versions"]
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def transformers(model: str) -> Peer:
    """transformers on float32 weights of ``model``, on all processors."""
    return Peer([sys.executable, "-m", f"{__package__}.transformers_script", model])


def llama_cpp(python: Path, gguf: Path, context: int) -> Peer:
    """llama.cpp by an interpreter that has it, for texts of ``context`` tokens, on all processors."""
    script = f"{__package__}.llama_script"
    return Peer([python, "-m", script, gguf, str(context), str(os.cpu_count() or 1)])


def _ask(process: "subprocess.Popen[str]", line: str | None) -> dict[str, Any] | None:
    """What the process says next, to ``line`` if there is one; None if it has died or been ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(_PATIENCE_S, process.kill)
    timer.start()
    try:
        if line is not None:
            print(line, file=process.stdin, flush=True)
        said = process.stdout.readline()
    except OSError:
        return None
    finally:
        timer.cancel()
    return json.loads(said) if said.endswith("\n") else None
