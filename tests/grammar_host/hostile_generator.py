"""Random requests of every kind, the same for the same seed."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.grammar_host.common import GUIDES
from tests.grammar_host.hostile import CORPUS, PATTERNS, Request

Make = Callable[[random.Random], Any]

_NAMES = ("a", "b", "name", "a/b", "a~b", "", "é", "😀", "$ref", '"', "x y", "%25")
_STRINGS = (*_NAMES, "\n", "\u2028", "a" * 300, "null", "-1.5e3", "\\", "</think>", "2024-02-29")
_NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    10,
    255,
    0.1,
    -0.5,
    1e-9,
    1e30,
    2**53 + 1,
    -(2**63),
    10**40,
    1.5,
    5e-324,
)
_COUNTS = (0, 0, 1, 1, 2, 3, 5, 10, 100, 10**4, 10**9, 2**64)
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_FORMATS = (
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "regex",
    "uri-reference", "json-pointer", "iri", "color", "", "idn-email", "byte", "int32",
)  # fmt: skip
_DRAFTS = (
    "http://json-schema.org/draft-04/schema#",
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-07/schema#",
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
    "urn:unknown",
)
_DEFINED = ("a", "b", "a/b", "a~b", "é", "%25")
_REFERENCES = (
    "#", "#/$defs/a", "#/$defs/a", "#/$defs/b", "#/$defs/a~1b", "#/$defs/a~0b", "#/$defs/%C3%A9", "#/$defs/é",
    "#/$defs/%2525", "#/$defs/a/items", "#a",
)  # fmt: skip
_NOWHERE = (
    "#/$defs/missing",
    "other.json",
    "#nowhere",
    "#/definitions/a",
    "https://example.com/s",
    "%%",
    "#/~2",
)


def generate(seed: int) -> Request:
    """The request of that number."""
    rng = random.Random(seed)
    kind = rng.choices(list(_KINDS), weights=[weight for weight, _ in _KINDS.values()])[0]
    value = _KINDS[kind][1](rng)
    options: dict[str, Any] = {}
    if kind in ("json", "json_schema") and rng.random() < 0.2:
        options = {"max_whitespace": rng.choice([0, 1, 8, 1000, "free"])}
        if rng.random() < 0.3:
            options = {"whitespace_pattern": _pattern(rng)[:256]}
    if kind == "json_schema" and rng.random() < 0.1:
        options["strict"] = True
    reasoning_end = rng.choice(["</think>", "<|tool|>", "a"]) if rng.random() < 0.05 else None
    return Request(kind, value, options, reasoning_end)


def _schema(rng: random.Random, depth: int = 3) -> Any:
    if depth == 0 or rng.random() < 0.1:
        return rng.choice(
            [True, {}, {"type": rng.choice(_TYPES)}, {"$ref": rng.choice(_REFERENCES)}]
        )
    schema: dict[str, Any] = {}
    if rng.random() < 0.6:
        schema["type"] = rng.choice(_TYPES)
    for keyword in rng.sample(list(_KEYWORDS), rng.choice([0, 1, 1, 2, 2, 3, 5])):
        schema[keyword] = _KEYWORDS[keyword](rng, depth - 1)
    if rng.random() < 0.03:  # what validators of schemas are for
        schema[rng.choice(list(_KEYWORDS))] = rng.choice([None, [], -1, "x", 1.5, [{}], {"a": 1}])
    return schema


def _root_schema(rng: random.Random) -> Any:
    if rng.random() < 0.25:
        return _mutated_schema(rng)
    schema = _schema(rng, rng.choice([1, 2, 3, 4]))
    if isinstance(schema, dict):
        if "#/$defs" in json.dumps(schema) or rng.random() < 0.1:
            schema["$defs"] = {name: _schema(rng, 2) for name in _DEFINED}
            schema["$defs"]["a"] = {"$anchor": "a", "items": _schema(rng, 1)}
        if rng.random() < 0.2:
            schema["$schema"] = rng.choice(_DRAFTS)
        if rng.random() < 0.05:
            schema["x-guidance"] = {"whitespace_flexible": False, "item_separator": _pattern(rng)}
    return schema


def _mutated_schema(rng: random.Random) -> Any:
    """A known schema with values swapped, moved and dropped; now and then damaged as text."""
    text = rng.choice(_known_schemas())
    if rng.random() < 0.2:
        return mutate(text, rng)
    document = json.loads(text)
    for _ in range(rng.randint(1, 4)):
        nodes = _containers(document)
        node, other = rng.choice(nodes), rng.choice(nodes)
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        match rng.randrange(4):
            case 0:
                node[key] = rng.choice([*_NUMBERS, *_STRINGS, True, False, None, [], {}])
            case 1:
                node[key] = json.loads(json.dumps(other))
            case 2:
                del node[key]
            case 3 if isinstance(node, dict):
                keyword = rng.choice(list(_KEYWORDS))
                node[keyword] = _KEYWORDS[keyword](rng, 1)
    return document


@functools.cache
def _known_schemas() -> list[str]:
    known = [GUIDES["schema"].text]
    for request in CORPUS.values():
        if request.kind == "json_schema" and isinstance(request.value, dict):
            text = _dump(request.value)
            if text is not None and len(text) < 2000:
                known.append(text)
    return known


def _containers(document: Any) -> list[Any]:
    """All objects and arrays that are not empty; the document itself, wrapped, if there is none."""
    found, queue = [], [document]
    while queue:
        node = queue.pop()
        if isinstance(node, dict | list) and node:
            found.append(node)
            queue.extend(node.values() if isinstance(node, dict) else node)
    return found or [[document]]


def _dump(value: Any) -> str | None:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None


def mutate(text: str, rng: random.Random) -> str:
    """A few characters changed, deleted, doubled, moved."""
    characters = list(text)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(characters) + 1)
        match rng.randrange(4):
            case 0:
                characters.insert(at, rng.choice(_ALPHABET))
            case 1:
                del characters[at : at + rng.randint(1, 8)]
            case 2:
                characters[at:at] = characters[at : at + rng.randint(1, 30)]
            case 3:
                characters.insert(at, characters.pop() if characters else "x")
    return "".join(characters)


_ALPHABET = "()[]{}|*+?^$.,:;=-\\\"'/<>#~%&!_ \n\t0159azAZ\0é😀\ud800\u2028\ufeff"


def _noise(rng: random.Random) -> str:
    length = rng.choice([1, 2, 5, 20, 60])
    if rng.random() < 0.3:
        return rng.randbytes(length).decode("utf-8", "surrogateescape")
    if rng.random() < 0.3:
        return rng.randbytes(length).decode("latin-1")
    return "".join(rng.choices(_ALPHABET, k=length))


def _pattern(rng: random.Random, depth: int = 4) -> str:
    """A regular expression, well formed more often than not."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(_ATOMS)
    inside = [_pattern(rng, depth - 1) for _ in range(rng.choice([1, 2, 2, 3]))]
    match rng.randrange(5):
        case 0:
            return f"({'|'.join(inside)})"
        case 1:
            return f"(?:{''.join(inside)}){rng.choice(_QUANTIFIERS)}"
        case 2:
            return f"^{''.join(inside)}$"
        case 3:
            return "".join(inside) + rng.choice(_QUANTIFIERS)
        case _:
            return "".join(inside)


_ATOMS = (
    "a", "b", "ab", ".", "\\d", "\\w", "\\s", "\\S", "[a-z]", "[^a]", "[^\"]",
    "é", "😀", "[^\\x00-\\x7f]", "\\.",
    "\\p{L}", "\\u00e9", "\\x41", "[\\d_-]", "(?=a)", "\\b", "^", "$", "\\/", "\"",
    "\\\\", "\\n", "()", "[\\s\\S]",
)  # fmt: skip
_QUANTIFIERS = (
    "*",
    "+",
    "?",
    "*?",
    "{2}",
    "{0,3}",
    "{2,}",
    "{0,200}",
    "{50}",
    "{3,1}",
    "{1000}",
    "",
)


def _regex(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return _noise(rng)
    if rng.random() < 0.3:
        return mutate(rng.choice([p for p in PATTERNS if len(p) < 200]), rng)
    return _pattern(rng)


def _rules(rng: random.Random, define: str, names: Sequence[str], atoms: Sequence[str]) -> str:
    """A grammar of a few rules that refer to each other."""

    def expression(depth: int) -> str:
        if depth == 0 or rng.random() < 0.3:
            return rng.choice([*atoms, *names])
        parts = [expression(depth - 1) for _ in range(rng.choice([1, 2, 2, 3]))]
        match rng.randrange(4):
            case 0:
                return f"({' | '.join(parts)})"
            case 1:
                return f"({' '.join(parts)}){rng.choice('*+?')}"
            case 2:
                return f"{' '.join(parts)} |"
            case _:
                return " ".join(parts)

    lines = [f"{name}{define} {expression(rng.choice([1, 2, 3]))}" for name in names]
    text = "\n".join(lines)
    return mutate(text, rng) if rng.random() < 0.3 else text


def _grammar(rng: random.Random) -> str:
    if rng.random() < 0.25:
        short = [r.value for r in CORPUS.values() if r.kind == "grammar" and r.code is None]
        return mutate(rng.choice([text for text in short if len(text) < 500]), rng)
    if rng.random() < 0.1:
        return "root ::= " + _noise(rng)
    atoms = (
        '"a"',
        '"é"',
        "[a-z]",
        '"\\n"',
        "[^b]",
        '"b"{2,3}',
        '""',
        "[😀-😂]",
        '"\\u0041"',
        '"x"{0,200}',
        ".",
    )
    return _rules(rng, " ::=", ("root", "a", "b", "c-d")[: rng.randint(1, 4)], atoms)


def _lark(rng: random.Random) -> str:
    if rng.random() < 0.25:
        short = [r.value for r in CORPUS.values() if r.kind == "lark" and r.code is None]
        return mutate(rng.choice([text for text in short if len(text) < 500]), rng)
    if rng.random() < 0.1:
        return "start: " + _noise(rng)
    atoms = (
        '"a"',
        '"é"',
        "/[a-z]+/",
        '"\\n"',
        "/[^b]/",
        '"b"~2..3',
        "/(a|b)*c/",
        '"a".."f"',
        "X",
        '["x"]',
        "/.*/",
    )
    text = _rules(rng, ":", ("start", "a", "b", "c")[: rng.randint(1, 4)], atoms)
    return text + '\nX: /x+/ | "y"' + rng.choice(["", "\n%ignore / +/"])


def _choice(rng: random.Random) -> Any:
    def one() -> Any:
        if rng.random() < 0.05:
            return rng.choice([None, 1, [], "\0", "\ud800"])
        return rng.choice(_STRINGS) if rng.random() < 0.5 else _noise(rng)

    return [one() for _ in range(rng.choice([0, 1, 2, 5, 30]))]


def _format(rng: random.Random, depth: int) -> dict[str, Any]:
    """A part of a structural tag."""
    kind = rng.choice(_SIMPLE_FORMATS if depth == 0 else [*_SIMPLE_FORMATS, *_NESTED_FORMATS])

    def inner() -> dict[str, Any]:
        return _format(rng, depth - 1)

    fields: dict[str, Any] = {
        "const_string": lambda: {"value": rng.choice(_STRINGS)},
        "json_schema": lambda: {"json_schema": _schema(rng, 2)},
        "regex": lambda: {"pattern": _regex(rng)},
        "grammar": lambda: {"grammar": _grammar(rng)},
        "any_text": lambda: {"excludes": rng.sample(_STRINGS, rng.randint(0, 2))},
        "token": lambda: {"token": rng.choice([5, 256, 257, 299, 300, -1, "<|tool|>", "<|no|>"])},
        "sequence": lambda: {"elements": [inner() for _ in range(rng.randint(0, 3))]},
        "or": lambda: {"elements": [inner() for _ in range(rng.randint(0, 3))]},
        "optional": lambda: {"content": inner()},
        "plus": lambda: {"content": inner()},
        "star": lambda: {"content": inner()},
        "repeat": lambda: {
            "content": inner(), "min": rng.choice(_COUNTS[:8]), "max": rng.choice(_COUNTS[:9])
        },
        "tag": lambda: {"begin": rng.choice(_STRINGS), "content": inner(), "end": rng.choice(_STRINGS)},
        "triggered_tags": lambda: {
            "triggers": rng.choice([["<f"], ["<f", "<g"], ["<"], [""], []]),
            "tags": [
                {"type": "tag", "begin": begin, "content": inner(), "end": rng.choice(["</f>", "", "\n"])}
                for begin in rng.sample(["<f>", "<g>", "<f=é>", "x", ""], rng.randint(1, 3))
            ],
        },
    }[kind]()  # fmt: skip
    if rng.random() < 0.05:
        fields[rng.choice([*fields, "unknown"])] = rng.choice([None, 5, [], "x", {}])
    return {"type": kind, **fields}


_SIMPLE_FORMATS = ("const_string", "json_schema", "regex", "grammar", "any_text", "token")
_NESTED_FORMATS = ("sequence", "or", "optional", "plus", "star", "repeat", "tag", "triggered_tags")


def _tag(rng: random.Random) -> Any:
    tag = {"type": "structural_tag", "format": _format(rng, rng.randint(0, 3))}
    return mutate(json.dumps(tag), rng) if rng.random() < 0.1 else tag


def _number(rng: random.Random, depth: int) -> Any:
    return rng.choice(_NUMBERS)


def _count(rng: random.Random, depth: int) -> Any:
    return rng.choice(_COUNTS)


def _schemas(rng: random.Random, depth: int) -> list[Any]:
    return [_schema(rng, depth) for _ in range(rng.choice([1, 2, 2, 3]))]


def _named_schemas(rng: random.Random, depth: int) -> dict[str, Any]:
    return {name: _schema(rng, depth) for name in rng.sample(_NAMES, rng.choice([1, 2, 3]))}


def _names(rng: random.Random, depth: int) -> list[str]:
    return rng.sample(_NAMES, rng.choice([0, 1, 1, 2]))


def _value(rng: random.Random, depth: int) -> Any:
    if depth > 0 and rng.random() < 0.3:
        inside = [_value(rng, depth - 1) for _ in range(2)]
        return (
            inside if rng.random() < 0.5 else dict(zip(rng.sample(_NAMES, 2), inside, strict=True))
        )
    return rng.choice([*_NUMBERS, *_STRINGS, None, True, False, [], {}])


_KEYWORDS: Mapping[str, Callable[[random.Random, int], Any]] = {
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _number
    ),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains"), _count
    ),
    **dict.fromkeys(("minProperties", "maxProperties"), _count),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _schemas),
    **dict.fromkeys(("not", "if", "then", "else", "items", "contains", "propertyNames"), _schema),
    **dict.fromkeys(("additionalProperties", "unevaluatedItems", "unevaluatedProperties"), _schema),
    **dict.fromkeys(("properties", "dependentSchemas"), _named_schemas),
    "patternProperties": lambda rng, depth: {_pattern(rng): _schema(rng, depth)},
    "dependentRequired": lambda rng, depth: {
        name: _names(rng, depth) for name in _names(rng, depth)
    },
    "required": _names,
    "pattern": lambda rng, depth: _pattern(rng),
    "format": lambda rng, depth: rng.choice(_FORMATS),
    "enum": lambda rng, depth: [_value(rng, depth) for _ in range(rng.choice([1, 2, 5]))],
    "const": _value,
    "uniqueItems": lambda rng, depth: rng.random() < 0.8,
    "$ref": lambda rng, depth: rng.choice(_REFERENCES if rng.random() < 0.95 else _NOWHERE),
}

_KINDS: Mapping[str, tuple[int, Make]] = {
    "json_schema": (55, _root_schema),
    "regex": (12, _regex),
    "grammar": (10, _grammar),
    "lark": (10, _lark),
    "choice": (5, _choice),
    "structural_tag": (7, _tag),
    "json": (1, lambda rng: None),
}
