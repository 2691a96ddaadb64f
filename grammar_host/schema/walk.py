"""Where the subschemas of a JSON Schema are, and what its local references point to.

All walks see a schema that has been read (`grammar_host.schema.reading`): references are pointers
from the root, and keywords that mean nothing in its draft are gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
IN_PLACE_SINGLES = ("not", "if", "then", "else")
IN_PLACE_MAPS = ("dependencies", "dependentSchemas")
DEFINITIONS = ("$defs", "definitions")
DATA = ("const", "enum", "default", "examples")
"""Keywords whose values are plain data, even where they look like schemas."""

_SINGLES = frozenset(
    {
        *IN_PLACE_SINGLES,
        "additionalItems",
        "additionalProperties",
        "contains",
        "items",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
_LISTS = frozenset({*IN_PLACE_LISTS, "prefixItems", "items"})
_MAPS = frozenset({*DEFINITIONS, *IN_PLACE_MAPS, "patternProperties", "properties"})


KEYWORDS = frozenset(
    {
        "$ref",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "contains",
        "dependentSchemas",
        "else",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "if",
        "items",
        "maxContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minContains",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "not",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "propertyNames",
        "required",
        "then",
        "type",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
"""What constrains documents, in the words that `grammar_host.schema.rewrite` leaves."""


def escape(token: str | int) -> str:
    """One reference token of a JSON pointer (RFC 6901)."""
    return str(token).replace("~", "~0").replace("/", "~1")


def unescape(token: str) -> str:
    """The opposite of `escape`."""
    return token.replace("~1", "/").replace("~0", "~")


def children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The direct subschemas of a schema, as (relative JSON pointer, subschema)."""
    for keyword, value in schema.items():
        if isinstance(value, dict):
            if keyword in _MAPS:
                for name, item in value.items():
                    yield f"/{keyword}/{escape(name)}", item
            elif keyword in _SINGLES:
                yield f"/{keyword}", value
        elif isinstance(value, list):
            if keyword in _LISTS:
                for index, item in enumerate(value):
                    yield f"/{keyword}/{index}", item
        elif isinstance(value, bool) and keyword in _SINGLES:
            yield f"/{keyword}", value


def resolve(document: Any, pointer: str) -> Any:
    """What a JSON pointer points to.

    Raises:
        KeyError: nothing.
    """
    value = document
    for token in pointer.split("/")[1:]:
        if isinstance(value, list):
            if not (token.isascii() and token.isdecimal()) or int(token) >= len(value):
                raise KeyError(pointer)
            value = value[int(token)]
        elif isinstance(value, dict):
            value = value[unescape(token)]
        else:
            raise KeyError(pointer)
    return value


def leads_through_data(document: Any, pointer: str) -> bool:
    """Whether a JSON pointer leads into a value that is data, such as an item of an `enum`."""
    value = document
    where = "schema"  # or "list" or "map" of schemas, or "elsewhere"
    for token in pointer.split("/")[1:]:
        token = unescape(token)
        value = value[int(token)] if isinstance(value, list) else value[token]
        if where != "schema":
            where = "schema" if where in ("list", "map") else where
        elif token in DATA:
            return True
        elif token in _MAPS:
            where = "map"
        elif token in _LISTS and isinstance(value, list):
            where = "list"
        elif token not in _SINGLES:
            where = "elsewhere"
    return False


def local_pointer(reference: Any) -> str | None:
    """The JSON pointer of a reference into the same document (`#/$defs/a`); None for others."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    return unquote(reference[1:])


def reference_to(pointer: str) -> str:
    """The opposite of `local_pointer`."""
    return "#" + quote(pointer, safe="/~!$&'()*+,;=:@?")


def referred(document: Any, schema: dict[str, Any]) -> Any:
    """What the `$ref` of a schema points to within the document; None if it has none."""
    pointer = local_pointer(schema.get("$ref"))
    try:
        return None if pointer is None else resolve(document, pointer)
    except KeyError:  # no longer: what it led to has been taken out
        return None


def in_place(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The subschemas that look at the same value, without `$ref`, as (keyword, subschema)."""
    for keyword, value in schema.items():
        if keyword in IN_PLACE_LISTS:
            yield from ((keyword, item) for item in value)
        elif keyword in IN_PLACE_SINGLES:
            yield keyword, value
        elif keyword in IN_PLACE_MAPS:
            yield from ((keyword, item) for item in value.values() if not isinstance(item, list))


def subschemas(document: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object that serves as a schema, as (JSON pointer, schema), the root first.

    Reaches the usual places and whatever references point to, wherever that is. Each object is
    visited once. The caller may change the object it was just given; what it puts in is visited,
    what it takes out is not.
    """
    visited: dict[int, Any] = {}  # holds the objects, so that no other one gets the same id
    queue: list[tuple[str, Any]] = [("", document)]
    while queue:
        pointer, schema = queue.pop()
        if not isinstance(schema, dict) or id(schema) in visited:
            continue
        visited[id(schema)] = schema
        yield pointer, schema
        nested = [(pointer + path, child) for path, child in children(schema)]
        if "$ref" in schema:
            nested.append((local_pointer(schema["$ref"]) or "", referred(document, schema)))
        queue.extend(reversed(nested))
