"""Where the subschemas of a JSON Schema are, and what its local references point to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
IN_PLACE_SINGLES = ("not", "if", "then", "else")
_SINGLES = (
    *IN_PLACE_SINGLES,
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "items",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LISTS = (*IN_PLACE_LISTS, "prefixItems", "items")
_MAPS = (
    "$defs",
    "definitions",
    "dependencies",
    "dependentSchemas",
    "patternProperties",
    "properties",
)


def escape(token: str | int) -> str:
    """One reference token of a JSON pointer (RFC 6901)."""
    return str(token).replace("~", "~0").replace("/", "~1")


def children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The direct subschemas of a schema, as (relative JSON pointer, subschema)."""
    for keyword, value in schema.items():
        if isinstance(value, dict):
            if keyword in _MAPS:
                for name, item in value.items():
                    yield f"/{escape(keyword)}/{escape(name)}", item
            elif keyword in _SINGLES:
                yield f"/{keyword}", value
        elif isinstance(value, list) and keyword in _LISTS:
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
        token = token.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            if not token.isdecimal() or int(token) >= len(value):
                raise KeyError(pointer)
            value = value[int(token)]
        elif isinstance(value, dict):
            value = value[token]
        else:
            raise KeyError(pointer)
    return value


def local_pointer(reference: Any) -> str | None:
    """The JSON pointer of a reference into the same document (`#/$defs/a`); None for others."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    return unquote(reference[1:])


def referred(document: Any, schema: dict[str, Any]) -> Any:
    """What the `$ref` of a schema points to within the document; None if it does not.

    References to nothing are reported, with their place, when a schema is read.
    """
    pointer = local_pointer(schema.get("$ref"))
    try:
        return None if pointer is None else resolve(document, pointer)
    except KeyError:
        return None


def subschemas(document: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object that serves as a schema, as (JSON pointer, schema), the root first.

    Reaches the usual places and whatever local references point to, wherever that is. Each object
    is visited once. The caller may change the object it was just given; what it puts in is
    visited, what it takes out is not.
    """
    visited: set[int] = set()
    queue: list[tuple[str, Any]] = [("", document)]
    while queue:
        pointer, schema = queue.pop()
        if not isinstance(schema, dict) or id(schema) in visited:
            continue
        visited.add(id(schema))
        yield pointer, schema
        nested = [(pointer + path, child) for path, child in children(schema)]
        nested.append((local_pointer(schema.get("$ref")) or "", referred(document, schema)))
        queue.extend(reversed(nested))
