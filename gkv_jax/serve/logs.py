"""Log lines on stderr, for people or as one JSON object each. The server's own and uvicorn's are alike.

No line holds a prompt, an answer, a schema or a key.
"""

import logging
import logging.config
from typing import Any

from gkv_jax.serve.settings import Log

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure(log: Log) -> None:
    """Send this process's log lines to stderr, as ``log`` says."""
    logging.config.dictConfig(logging_config(log))
    logging.captureWarnings(True)  # a bare line of text among JSON would break what reads it


def logging_config(log: Log) -> dict[str, Any]:
    """For ``logging.config.dictConfig``."""
    level = log.level.upper()
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "text": {"format": _TEXT},
            "json": {
                "()": "pythonjsonlogger.json.JsonFormatter",
                "fmt": ["asctime", "levelname", "name", "message"],
                "datefmt": "%Y-%m-%dT%H:%M:%S%z",
                "rename_fields": {"asctime": "time", "levelname": "level", "name": "logger"},
                # uvicorn's messages again, with colours.
                "reserved_attrs": [*_standard_attributes(), "color_message"],
            },
        },
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "stream": "ext://sys.stderr",
                "formatter": log.format,
            }
        },
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {
            "gkv_jax": {"level": level},
            "uvicorn": {"level": level},
            # ``gkv_jax.serve.middleware`` writes these lines, with what the application knows.
            "uvicorn.access": {"level": "CRITICAL"},
        },
    }


def _standard_attributes() -> list[str]:
    from pythonjsonlogger.core import RESERVED_ATTRS

    return list(RESERVED_ATTRS)
