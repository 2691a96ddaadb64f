"""What the text of a token does to a JSON document."""

from __future__ import annotations

import re
from dataclasses import dataclass

_STRING_END = re.compile(rb'(?:[^"\\]|\\[\s\S])*"')
_SCALAR = re.compile(rb'[^ \t\n\r,:"{}\[\]]+')
_KEY_BEGINS = re.compile(rb'[,{][ \t\n\r]*"')
_BEHIND_VALUE = re.compile(rb"[ \t\n\r,:]+\Z")


def string_end(text: bytes) -> int:
    """Where the string ends that the text goes on with; -1 if it does not."""
    match = _STRING_END.match(text)
    return match.end() if match else -1


@dataclass(frozen=True, slots=True)
class Effects:
    """What a text does that begins outside of strings.

    Attributes:
        closings: containers that it closes and did not open.
        completes: whether it completes a value that it began itself.
        touches_keys: whether it begins a key behind a comma or brace of its own, or goes on in a
            container around those that it closes.
    """

    closings: int = 0
    completes: bool = False
    touches_keys: bool = False

    @classmethod
    def of(cls, text: bytes) -> Effects:
        """Looks through a text."""
        closings = opened = position = 0
        touches_keys = _KEY_BEGINS.search(text) is not None
        while position < len(text):
            byte = text[position : position + 1]
            position += 1
            if byte == b'"':
                end = string_end(text[position:])
                return cls(closings, end >= 0, touches_keys)
            if byte in b"{[":
                opened += 1
            elif byte in b"}]":
                if opened:
                    return cls(closings, True, touches_keys)
                closings += 1
            elif byte == b",":
                touches_keys = touches_keys or closings > 0
            elif byte not in b" \t\n\r:":
                scalar = _SCALAR.match(text, position - 1)
                assert scalar is not None
                position = scalar.end()
                if position < len(text):
                    return cls(closings, True, touches_keys)
        return cls(closings, False, touches_keys)


def essence(text: bytes, *, in_string: bool) -> bytes:
    """A text without what behind a finished part makes no difference to what it finishes.

    Args:
        text: what is added to a document.
        in_string: whether it is added in a string.
    """
    behind = _BEHIND_VALUE.search(text)
    if behind is None or _ends_in_string(text, in_string):
        return text
    stripped = text[: behind.start()]
    if b"," in behind[0]:
        return stripped + b","
    # Behind a number the first blank ends it.
    return stripped if stripped[-1:] in (b'"', b"}", b"]") else stripped + b" "


def _ends_in_string(text: bytes, in_string: bool) -> bool:
    position = 0
    while True:
        if not in_string:
            position = text.find(b'"', position) + 1
            if not position:
                return False
        length = string_end(text[position:])
        if length < 0:
            return True
        position, in_string = position + length, False
