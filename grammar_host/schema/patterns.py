"""Regular expressions of JSON Schema (ECMA-262) for engines that read Rust's dialect.

The two differ in small things that change the language: what `.` and `\\s` match, how a bracket
inside of a class reads, control escapes.
"""

from __future__ import annotations

import re

_ANY = r"[^\n\r\u2028\u2029]"
_SPACE = r"\t\n\x0B\x0C\r \u00A0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_TOKENS = re.compile(
    r"""\\c([A-Za-z])            # a control character
      | \\u\{([0-9A-Fa-f]+)\}    # a code point
      | \\(?:u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|[\s\S])
      | [\s\S]""",
    re.VERBOSE,
)
_CLASSES = {"d": r"0-9", "w": r"0-9A-Za-z_", "s": _SPACE}


def to_rust(pattern: str) -> str:
    """The same language in the syntax of Rust's `regex` crate.

    A pattern that is not valid in ECMA-262 stays invalid or is returned as it is: engines and the
    validator report it.
    """
    parts: list[str] = []
    in_class = False
    for match in _TOKENS.finditer(pattern):
        token = match[0]
        if match[1]:
            token = f"\\x{ord(match[1].upper()) - 64:02X}"
        elif match[2]:
            token = rf"\u{{{match[2]}}}"
        elif token == "\\/" or (token == "\\-" and not in_class):
            token = token[1]
        elif len(token) == 2 and token[0] == "\\" and token[1] in "dws":
            ranges = _CLASSES[token[1]]
            token = ranges if in_class else f"[{ranges}]"
        elif len(token) == 2 and token[0] == "\\" and token[1] in "DWS" and not in_class:
            token = f"[^{_CLASSES[token[1].lower()]}]"
        elif in_class:
            if token == "]":
                in_class = False
            elif token in "[&~":
                token = f"\\{token}"
        elif token == "[":
            in_class = True
        elif token == ".":
            token = _ANY
        parts.append(token)
    return "".join(parts)
