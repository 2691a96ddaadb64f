"""Regular expressions of JSON Schema (ECMA-262) for engines that read Rust's dialect.

The two differ in small things that change the language: what `.`, `\\s` and `\\w` match, how a
bracket inside of a class reads, control escapes.
"""

from __future__ import annotations

import re

_ANY = r"[^\n\r\u2028\u2029]"
_CLASSES = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t\n\x0B\x0C\r \u00A0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF",
}
_TOKENS = re.compile(
    r"""\\c(?P<control>[A-Za-z])
      | \\u\{(?P<code>[0-9A-Fa-f]+)\}
      | \\(?P<escaped>[\s\S])
      | [\s\S]""",
    re.VERBOSE,
)


def to_rust(pattern: str) -> str:
    """The same language in the syntax of Rust's `regex` crate.

    A pattern that is not valid in ECMA-262 stays invalid or is returned as it is: engines and the
    validator report it.
    """
    parts: list[str] = []
    in_class = False
    for match in _TOKENS.finditer(pattern):
        if match["control"]:
            parts.append(f"\\x{ord(match['control'].upper()) - 64:02X}")
        elif match["code"]:
            parts.append(f"\\u{{{match['code']}}}")
        elif match["escaped"]:
            parts.append(_escape(match["escaped"], in_class))
        elif in_class:
            in_class = match[0] != "]"
            # Rust reads nested classes and set operations there.
            parts.append(f"\\{match[0]}" if match[0] in "[&~" else match[0])
        else:
            in_class = match[0] == "["
            parts.append(_ANY if match[0] == "." else match[0])
    return "".join(parts)


def stacks_quantifiers(pattern: str) -> bool:
    """Whether a quantifier follows another one, which ECMA-262 does not know.

    Some read `a++` as possessive, which matches less; others as `(a+)+`.
    """
    in_class = False
    after_quantifier = False
    for match in _TOKENS.finditer(re.sub(r"\{\d+(,\d*)?\}", "+", pattern)):
        if in_class:
            in_class = match[0] != "]"
        elif match[0] in "*+" and after_quantifier:
            return True
        else:
            in_class = match[0] == "["
        after_quantifier = not in_class and match[0] in "*+?"
    return False


def _escape(character: str, in_class: bool) -> str:
    ranges = _CLASSES.get(character.lower())
    if ranges is not None:
        if character.isupper():
            return f"[^{ranges}]"
        return ranges if in_class else f"[{ranges}]"
    if character == "/" or (character == "-" and not in_class):
        return character
    return f"\\{character}"
