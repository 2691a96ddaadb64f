"""Regular expressions in the form in which outlines_core 0.2.14 compiles them faithfully.

It builds a DFA for searching with the leftmost-first rule, and walks it as if it recognised whole
texts. That goes wrong in three ways, which `whole_text` repairs:

- `ab|abc` would refuse `abc`, because the search prefers the first alternative: so the expression
  is followed by `\\z`, which only holds at the end.
- An expression that begins with a look-behind assertion, or that may match the empty text before
  `\\z`, has no start state: so it is preceded by a sentinel, the NUL character. Who walks the
  automaton takes the sentinel first.
- A search may begin anywhere, so that the DFA of `"(\\\\.|[^"])*{0,20}"` has 2²⁰ states: so no
  class of the expression matches the sentinel, behind which alone a match may begin. Texts with
  NUL characters are thereby left out of the language, unless the expression writes one literally.

The syntax is that of Rust's `regex` crate, but that `\\d` and `\\w` mean ASCII, as in JSON Schema and
in the other engines.
"""

from __future__ import annotations

import re

from grammar_host.errors import (
    GrammarTooComplexError,
    GuideError,
    InvalidGuideError,
    UnsupportedGuideError,
)

SENTINEL = b"\0"
"""What precedes every text of the automaton."""

MAX_REPETITION = 10_000
"""Copies of single characters and classes that counted repetitions may expand into."""

_TOKEN = re.compile(
    r"""(?P<look>\(\?<?[=!])
      | (?P<flags>\(\?(?P<set>[A-Za-z-]+)[:)])
      | (?P<open>\((?:\?(?:P?<[^>]*>|:))?)
      | (?P<close>\))
      | (?P<count>\{(?P<least>\d+)(?:,(?P<most>\d*))?\})
      | (?P<operator>[*+?|])
      | (?P<escape>\\(?:[pP]\{[^}]*\}|[pP]?.))
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_BRACKET = re.compile(r"\[\^?\]?")
_CLASS_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ASCII = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
}
_REFUSED_ESCAPES = {
    **dict.fromkeys("123456789k", "backreferences"),
    **dict.fromkeys("bB", "word boundaries"),
}


def whole_text(pattern: str) -> str:
    """An expression whose DFA accepts the sentinel and then exactly the texts of `pattern`."""
    return rf"\x00(?:{pattern})\z"


def literal(text: str) -> str:
    """An expression that matches one text."""
    return re.sub(r"[^0-9A-Za-z]", lambda match: rf"\x{{{ord(match[0]):x}}}", text)


def checked_regex(pattern: str, param: str) -> str:
    """A caller's expression, without its leading anchor, and with classes free of the sentinel.

    Args:
        pattern: the expression; it must match the whole text whether it is anchored or not.
        param: the field that errors name.

    Raises:
        InvalidGuideError: brackets that do not match; other mistakes are found by the engine.
        UnsupportedGuideError: look-around and the like, which no automaton has.
        GrammarTooComplexError: repetitions multiply.
    """
    return _Reader(pattern, param).run()


class _Reader:
    def __init__(self, pattern: str, param: str) -> None:
        self._pattern = pattern
        self._param = param
        self._parts: list[str] = []
        # What `.` stands for; None where that depends on flags that are not tracked.
        self._dot: str | None = r"[^\n\x00]"
        # Per open group: how many characters and classes it expands into so far.
        self._sizes = [0]
        self._last = 0

    def run(self) -> str:
        position = 0
        while position < len(self._pattern):
            position = self._step(position)
        if len(self._sizes) > 1:
            raise InvalidGuideError(self._param, "a group is not closed")
        if self._sizes[0] > MAX_REPETITION + len(self._pattern):
            raise GrammarTooComplexError(
                self._param,
                f"its repetitions expand into more than {MAX_REPETITION} characters; "
                "use smaller counts, or * and +",
            )
        return "".join(self._parts)

    def _step(self, position: int) -> int:
        """Reads one token; returns where the next one begins."""
        if self._pattern[position] == "[":
            end = self._class_end(position)
            self._class(self._pattern[position:end])
            return end
        match = _TOKEN.match(self._pattern, position)
        assert match is not None
        token = match[0]
        if match["look"]:
            raise self._unsupported("look-around")
        if match["set"]:
            self._check_flags(match["set"])
            self._parts.append(token)
            if "s" in match["set"] or "R" in match["set"]:
                self._dot = r"[^\x00]" if token == "(?s)" and position == 0 else None
        elif match["escape"]:
            self._escape(token)
        elif token == "^":
            self._anchor()
        elif token == ".":
            self._atom(self._dot or token)
        elif match["other"]:
            self._atom(token)
        else:
            self._parts.append(token)
        if match["open"] or (match["flags"] and token.endswith(":")):
            self._sizes.append(0)
        elif match["close"]:
            self._close()
        elif match["count"]:
            self._repeat(int(match["most"] or match["least"]))
        return match.end()

    def _atom(self, text: str) -> None:
        self._parts.append(text)
        self._sizes[-1] += 1
        self._last = 1

    def _close(self) -> None:
        self._last = self._sizes.pop()
        if not self._sizes:
            raise InvalidGuideError(self._param, "a group is closed that was not opened")
        self._sizes[-1] += self._last

    def _repeat(self, count: int) -> None:
        self._sizes[-1] += self._last * (max(count, 1) - 1)
        self._last *= max(count, 1)

    def _escape(self, token: str) -> None:
        name = token[1]
        if name in _REFUSED_ESCAPES:
            raise self._unsupported(_REFUSED_ESCAPES[name])
        if name == "A":
            self._anchor()
        else:
            token = _ASCII.get(name, token)
            self._atom(rf"[{token}--\x00]" if name in "DSWpP" else token)

    def _class(self, text: str) -> None:
        if text.startswith("[:"):  # a colon, which must not become the mark of `[[:alpha:]]`
            text = rf"[\:{text[2:]}"
        text = _CLASS_ESCAPE.sub(lambda match: _ASCII.get(match[1], match[0]), text)
        self._atom(rf"[{text}--\x00]")

    def _anchor(self) -> None:
        # Behind the sentinel, `^` would never hold; where the text begins, it says nothing.
        if self._sizes != [0]:
            raise self._unsupported("an anchor anywhere but at its beginning", "; leave it out")
        self._parts.append("(?:)")

    def _check_flags(self, flags: str) -> None:
        for flag, meaning in (("x", "verbose mode"), ("u", "matching bytes")):
            if flag in flags:
                raise self._unsupported(meaning, f"; leave the flag {flag} out")

    def _class_end(self, start: int) -> int:
        depth = 0
        position = start
        while position < len(self._pattern):
            character = self._pattern[position]
            if character == "[":
                depth += 1
                match = _BRACKET.match(self._pattern, position)  # []a] and [^]a]
                position = match.end() if match else position + 1
                continue
            position += 2 if character == "\\" else 1
            if character == "]":
                depth -= 1
                if depth == 0:
                    return position
        raise InvalidGuideError(self._param, "a character class is not closed")

    def _unsupported(self, what: str, way_out: str = "") -> GuideError:
        return UnsupportedGuideError(
            self._param, f"outlines does not support {what} in regular expressions{way_out}"
        )
