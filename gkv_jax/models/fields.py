"""Options of a model, from ``config.json`` or GGUF metadata, none of which may go unread."""

import sys
from collections.abc import Callable, Mapping, Sequence
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

    def nullable(self, read: Callable[[str, Any], Any], key: str, default: Any) -> Any:
        """``read(key, default)``, but None where the file says null."""
        return read(key, None if key in self._values else default)

    def integer(self, key: str, default: Any = REQUIRED) -> Any:
        """An integer of 64 bits, or ``default``; UserError for anything else."""
        value = self._typed(key, default, "an integer", is_integer)
        if is_integer(value) and abs(value) >= 1 << 63:
            raise UserError(f"{self.where}{key} is absurdly large: {_short(value)}")
        return value

    def number(self, key: str, default: Any = REQUIRED) -> Any:
        """A finite number as a float, or ``default``; UserError for anything else."""
        value = self._typed(key, default, "a finite number", _is_number)
        return float(value) if _is_number(value) else value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; UserError for anything else."""
        value: bool = self._typed(
            key, default, "true or false", lambda value: isinstance(value, bool)
        )
        return value

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        """A string, or ``default``; UserError for anything else."""
        return self._typed(key, default, "a string", lambda value: isinstance(value, str))

    def mapping(self, key: str, default: Any = REQUIRED) -> Any:
        """A mapping, or ``default``; UserError for anything else."""
        return self._typed(key, default, "an object", lambda value: isinstance(value, Mapping))

    def sequence(self, key: str, default: Any = REQUIRED) -> Any:
        """A list, or ``default``; UserError for anything else."""
        return self._typed(
            key,
            default,
            "a list",
            lambda value: isinstance(value, Sequence) and not isinstance(value, str),
        )

    def _typed(self, key: str, default: Any, kind: str, check: Callable[[Any], bool]) -> Any:
        value = self.get(key, default)
        if value is not default and not check(value):
            raise UserError(f"{self.where}{key} must be {kind}, not {_short(value)}")
        return value

    def serve_only(self, key: str, *values: Any) -> None:
        """Read ``key``. Raises UserError unless it is one of ``values``; None stands for absent."""
        value = self.get(key)
        if not any(type(value) is type(each) and value == each for each in values):
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


def is_integer(value: Any) -> bool:
    """Whether it is an integer, which true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (is_integer(value) or isinstance(value, float)) and abs(value) <= sys.float_info.max


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
