"""How a peer speaks from a process of its own, lines of JSON; imported by interpreters without ours.

First a line ``{"versions": ...}``, then for each line ``{"prompt": [token, ...], "schema": ...,
"max_tokens": ...}`` one line: ``{"error": ...}`` where the schema is refused, or else ``{"text",
"tokens", "finished", "forwards", "first_seconds", "seconds"}``.
"""

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any


def serve(start: Callable[[], Callable[..., dict[str, Any]]], packages: Sequence[str]) -> None:
    """Serve standard input until its end.

    Args:
      start: loads what is needed, warms it up, and returns what answers a request's fields.
      packages: whose versions are told.
    """
    # Libraries may print: the answers keep standard output, the rest goes to the errors.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def write(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=out, flush=True)

    answer = start()
    write({"versions": {package: importlib.metadata.version(package) for package in packages}})
    for line in sys.stdin:
        try:
            write(answer(**json.loads(line)))
        except Exception as error:  # whatever a schema provokes in a library
            write({"error": f"{type(error).__name__}: {error}"})
