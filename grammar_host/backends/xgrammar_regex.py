"""Regular expressions for XGrammar, which reads some of them as others without a word."""

from __future__ import annotations

import re

from grammar_host.errors import UnsupportedGuideError

_TOKEN = re.compile(r"\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\u\{[0-9A-Fa-f]+\}|\\[\s\S]|[\s\S]")
_KNOWN_ESCAPES = frozenset("bBcdDfkKnpPrsStvwW0123456789")
"""Letters that XGrammar reads as a class or a character, or refuses itself; others it would read
as they are, `\\A` as the letter A."""

_ESCAPED = frozenset(".*+?()[]{}|\\^$/-&~ \t\n")

_NOT_NEWLINE = r"[^\n]"


def checked_regex(pattern: str) -> str:
    """The pattern as XGrammar has to get it to read it like the other engines.

    Its `.` would match a newline. It ignores anchors wherever they stand, which is right only at
    the beginning and the end.

    Raises:
        UnsupportedGuideError: an anchor or an escape that XGrammar would misread.
    """
    parts: list[str] = []
    depth = 0
    in_class = False
    tokens = _TOKEN.findall(pattern)
    for index, token in enumerate(tokens):
        if token[0] == "\\":
            if (
                len(token) == 2
                and token[1].isascii()
                and token[1].isalpha()
                and token[1] not in _KNOWN_ESCAPES
            ):
                raise _unsupported(token)
            if len(token) == 2 and not token[1].isalnum() and token[1] not in _ESCAPED:
                token = token[1]  # it would say that it does not know the escape
        elif in_class:
            # Nested classes, and `-`, `&` or `~` twice, are operations elsewhere; a `]` that comes
            # first is a character elsewhere.
            if token == "[" or (token in "-&~" and tokens[index + 1 : index + 2] == [token]):
                raise _unsupported(f"{token} in a class")
            in_class = token != "]"
        elif token == "[":
            in_class = True
            if "]" in tokens[index + 1 : index + 2] or tokens[index + 1 : index + 3] == ["^", "]"]:
                raise _unsupported("] at the beginning of a class")
        elif token in "()":
            depth += 1 if token == "(" else -1
        elif token == ".":
            token = _NOT_NEWLINE
        elif token in "^$":
            outer = tokens[index - 1 : index] if token == "^" else tokens[index + 1 : index + 2]
            if depth or outer not in ([], ["|"]):
                raise _unsupported(token)
        parts.append(token)
    return "".join(parts)


def _unsupported(token: str) -> UnsupportedGuideError:
    reason = f"{token!r} is not served there by xgrammar; use backend 'llguidance'"
    return UnsupportedGuideError("regex", reason)
