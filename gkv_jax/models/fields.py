"""Options of a model, from ``config.json`` or GGUF metadata, none of which may go unread."""

from collections.abc import Mapping
from typing import Any

from gkv_jax.errors import UserError

REQUIRED: Any = object()
"""The default of an option that must be there."""


class Fields:
    """A mapping of options that knows which of them were read; what nobody reads is an error by name.

    An option that is null counts as absent.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """``where`` stands before a key in messages: ``"config.json: "`` or ``"GGUF: llama."``."""
        self.where = where
        self._values = values
        self._unread = {key for key, value in values.items() if value is not None}

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key``, read from now on. Raises UserError where a required one is absent."""
        self._unread.discard(key)
        value = self._values.get(key)
        if value is None and default is REQUIRED:
            raise UserError(f"{self.where}{key} is missing; the file is incomplete")
        return default if value is None else value

    def nullable(self, key: str, default: Any) -> Any:
        """As ``get``, but null is None, and only an absent key is ``default``."""
        return self.get(key) if key in self._values else default

    def integer(self, key: str, default: Any = REQUIRED) -> int:
        """An integer; UserError for anything else."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{self.where}{key} must be an integer, not {_short(value)}")
        return value

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """A number; UserError for anything else."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"{self.where}{key} must be a number, not {_short(value)}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; UserError for anything else."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.where}{key} must be true or false, not {_short(value)}")
        return value

    def serve_only(self, key: str, *values: Any) -> None:
        """Read ``key``. Raises UserError unless it is one of ``values``; None stands for absent."""
        value = self.get(key)
        if value not in values:
            served = ", ".join("absent" if each is None else repr(each) for each in values)
            raise UserError(f"{self.where}{key}={_short(value)} is not served (served: {served})")

    def inert(self, *keys: str) -> None:
        """Read keys that are of no consequence."""
        self._unread.difference_update(keys)

    def finish(self) -> None:
        """Raise UserError that lists what nobody read. False passes: it is an option that is off."""
        unread = sorted(key for key in self._unread if self._values[key] is not False)
        if unread:
            listed = ", ".join(f"{self.where}{key}={_short(self._values[key])}" for key in unread)
            raise UserError(
                f"{listed}: not served; an option that changes nothing of what the model computes "
                "can be removed from the file"
            )


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
