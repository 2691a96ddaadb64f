"""What the text of a token does to a JSON document."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_STRING_END = re.compile(rb'(?:[^"\\]|\\[\s\S])*"')
_SCALAR = re.compile(rb'[^ \t\n\r,:"{}\[\]]+')
_KEY_BEGINS = re.compile(rb'[,{][ \t\n\r]*"')
_BEHIND_VALUE = re.compile(rb"[ \t\n\r,:]+\Z")
_MALFORMED = re.compile(rb"[\x00-\x1f]|\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]")

RESTRICTING = (b"\xe0", b"\xed", b"\xf0")
"""First bytes of characters that not every continuation byte may follow."""


def string_end(text: bytes) -> int:
    """Where the string ends that the text goes on with; -1 if it does not."""
    match = _STRING_END.match(text)
    return match.end() if match else -1


def is_malformed(text: bytes, start: int = 0, end: int | None = None) -> bool:
    """Whether `text[start:end]`, inside of a string, makes that string no JSON.

    Those are control characters, surrogates and overlong characters, which XGrammar lets pass beside
    lengths and patterns. All other bytes that are no UTF-8 no engine lets pass.
    """
    # The character may have begun before.
    return _MALFORMED.search(text, max(start - 1, 0), len(text) if end is None else end) is not None


def writes_malformed(text: bytes, *, in_string: bool) -> bool:
    """Whether what a text writes into strings makes one of them no JSON.

    Args:
        text: what is added to a document.
        in_string: whether it is added in a string.
    """
    return any(is_malformed(part) for part in _parts_in_strings(text, in_string))


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
    parts = [*_parts_in_strings(text, in_string)]
    return bool(parts) and string_end(parts[-1]) < 0


def _parts_in_strings(text: bytes, in_string: bool) -> Iterator[bytes]:
    """What a text writes into strings, with their closing quotes; the last may lack it."""
    position = 0
    while True:
        if not in_string:
            position = text.find(b'"', position) + 1
            if not position:
                return
        length = string_end(text[position:])
        yield text[position:] if length < 0 else text[position : position + length]
        if length < 0:
            return
        position, in_string = position + length, False
