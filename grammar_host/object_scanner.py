"""JSON objects as they are written: how far a text may still become one."""

import re
from typing import Literal

# Each matches the longest text that may still become what it is named after.
_STRING_TEXT = re.compile(r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_EXPONENT_BEGUN = r"[eE][+-]?[0-9]*"
_SCALAR_BEGUN = re.compile(
    rf"-?(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:{_EXPONENT_BEGUN})?)?|{_EXPONENT_BEGUN})?"
    r"|-|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?"
)
_SCALAR = re.compile(r"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null)\Z")
_BLANKS = re.compile(r"[ \t\n\r]*")

_Due = Literal["object", "first key", "key", "colon", "first item", "value", "more"]

Outcome = Literal["open", "closed", "broken"]


class ObjectScanner:
    """Reads one JSON object (RFC 8259) that is written piece by piece, without keeping it.

    Attributes:
      position: how far the text was read; where the object ends once it is ``"closed"``, and the first
        character that no JSON object has there if it is ``"broken"``.
    """

    def __init__(self, position: int = 0) -> None:
        """``position``: where the object begins."""
        self.position = position
        self._due: _Due = "object"
        self._closers: list[str] = []
        self._in_string = False

    def scan(self, text: str) -> Outcome:
        """Read on. ``text`` is all of it: what was scanned before, and what came since."""
        while self.position < len(text):
            outcome = self._string(text) if self._in_string else self._between(text)
            if outcome is not None:
                return outcome
        return "open"

    def _string(self, text: str) -> Outcome | None:
        self.position = _end(_STRING_TEXT, text, self.position)
        if self.position == len(text):
            return None
        if text[self.position] == '"':
            self._in_string = False
            self.position += 1
            return None
        # An escape is read at once: one that is unfinished stays behind the position.
        begun = _end(_ESCAPE_BEGUN, text, self.position)
        return self._unless_unfinished(text, begun)

    def _between(self, text: str) -> Outcome | None:
        self.position = _end(_BLANKS, text, self.position)
        if self.position == len(text):
            return None
        character, due = text[self.position], self._due
        if character == '"' and due in ("first key", "key", "first item", "value"):
            self._in_string = True
            self._due = "colon" if due in ("first key", "key") else "more"
        elif character == "{" and due in ("object", "first item", "value"):
            self._closers.append("}")
            self._due = "first key"
        elif character == "[" and due in ("first item", "value"):
            self._closers.append("]")
            self._due = "first item"
        elif character in "}]" and due in ("first key", "first item", "more"):
            if character != self._closers.pop():
                return "broken"
            self._due = "more"
        elif character == "," and due == "more":
            self._due = "key" if self._closers[-1] == "}" else "value"
        elif character == ":" and due == "colon":
            self._due = "value"
        elif due in ("first item", "value"):
            return self._scalar(text)
        else:
            return "broken"
        self.position += 1
        return None if self._closers else "closed"

    def _scalar(self, text: str) -> Outcome | None:
        begun = _end(_SCALAR_BEGUN, text, self.position)
        if begun < len(text) and _SCALAR.match(text, self.position, begun):
            self.position, self._due = begun, "more"
            return None
        return self._unless_unfinished(text, begun)

    def _unless_unfinished(self, text: str, begun: int) -> Outcome:
        if begun == len(text):
            return "open"
        self.position = begun
        return "broken"


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return position if match is None else match.end()
