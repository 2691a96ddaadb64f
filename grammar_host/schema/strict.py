"""Closing a schema: what it does not mention is not allowed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grammar_host.schema.walk import (
    DEFINITIONS,
    IN_PLACE_LISTS,
    IN_PLACE_MAPS,
    IN_PLACE_SINGLES,
    children,
    in_place,
    referred,
)

_OPENING = ("additionalProperties", "unevaluatedProperties")
_RULING = frozenset(
    {
        *_OPENING,
        *IN_PLACE_LISTS,
        *IN_PLACE_SINGLES,
        *IN_PLACE_MAPS,
        "$ref",
        "patternProperties",
        "properties",
    }
)
"""Keywords that say, or pass on, which properties an object has."""

_NOT_MONOTONE = ("not", "if", "oneOf", "maxContains")
"""Where a narrower subschema would make the schema wider, or may."""


def close_objects(document: dict[str, Any]) -> None:
    """Forbids unmentioned properties and items, in place. Only ever narrows the language.

    - An object whose schema mentions a property gets `additionalProperties: false`. The properties
      of all schemas that describe the same object (`allOf`, `anyOf`, `oneOf`, `if`, `then`, `else`,
      `dependentSchemas`, `$ref`) count as mentioned; they are added as `true`, since those schemas
      still rule their values. An object whose schemas mention none, or say `additionalProperties`
      or `unevaluatedProperties` themselves, stays as it is.
    - Schemas that only pass on (`$ref`, `anyOf` or an `allOf` of one, and no other rule for
      objects beside it) are not closed themselves: what they lead to is. So the alternatives of a
      union are closed one by one.
    - Tuples end where their list of items ends, unless they say what follows or another schema
      describes the same array.
    - Within `not`, `if`, `oneOf` and `contains` beside `maxContains`, and in the definitions used
      there, nothing is closed: it would allow what the schema forbids. Nor is a schema closed that
      another one builds on; where it stands alone, the reference to it is.
    """
    _Closing(document).run()


class _Closing:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._parts: dict[int, Any] = {}  # describe the same value as a schema around them
        self._frozen: dict[int, Any] = {}  # are used where nothing may be narrowed
        self._wholes: dict[int, Any] = {}  # describe a value by themselves, or pass on

    def run(self) -> None:
        self._sort(self._document)
        mentions = {key: self._mentions(whole) for key, whole in self._wholes.items()}
        for key, whole in self._wholes.items():
            if key in self._parts or key in self._frozen:
                continue
            if not _passes_on(whole):
                _close(whole, *mentions[key])
                self._close_tuple(whole)
            elif "$ref" in whole:
                target = id(referred(self._document, whole))
                if target in self._parts or target in self._frozen:
                    # Others build on the target: so it is closed here, where it stands alone.
                    whole["allOf"] = [{"$ref": whole.pop("$ref")}]
                    _close(whole, *mentions[key])

    def _sort(self, root: dict[str, Any]) -> None:
        """Finds out what role every schema plays."""
        queue: list[Any] = [root]
        while queue:
            schema = queue.pop()
            if not isinstance(schema, dict) or id(schema) in self._wholes:
                continue
            self._wholes[id(schema)] = schema
            if _passes_on(schema):
                queue.extend(self._in_place(schema))
                queue.extend(_below(schema))
                continue
            parts = list(self._closure(schema))
            self._parts.update((id(part), part) for part in parts[1:])
            for part in parts:
                self._freeze(part)
                queue.extend(_below(part))

    def _freeze(self, schema: dict[str, Any]) -> None:
        queue = [schema[keyword] for keyword in _NOT_MONOTONE if keyword in schema]
        if "maxContains" in schema:
            queue.append(schema["contains"])
        while queue:
            found = queue.pop()
            if isinstance(found, list):
                queue.extend(found)
            elif isinstance(found, dict) and id(found) not in self._frozen:
                self._frozen[id(found)] = found
                queue.extend(child for _, child in children(found))
                queue.append(referred(self._document, found))

    def _in_place(self, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for keyword, item in in_place(schema):
            # What `not` mentions is not allowed for being mentioned.
            if keyword != "not" and isinstance(item, dict):
                yield item
        target = referred(self._document, schema)
        if isinstance(target, dict):
            yield target

    def _closure(self, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The schema and all that describe the same value."""
        seen: set[int] = set()
        queue = [schema]
        while queue:
            part = queue.pop(0)
            if id(part) not in seen:
                seen.add(id(part))
                yield part
                queue.extend(self._in_place(part))

    def _mentions(self, schema: dict[str, Any]) -> tuple[list[str], list[str]]:
        """Mentioned names, and patterns of names; no names if the object stays open."""
        names: dict[str, None] = {}
        patterns: dict[str, None] = {}
        for part in self._closure(schema):
            if any(keyword in part for keyword in _OPENING):
                return [], []
            names.update(dict.fromkeys(part.get("properties", ())))
            patterns.update(dict.fromkeys(part.get("patternProperties", ())))
        return list(names), list(patterns)

    def _close_tuple(self, schema: dict[str, Any]) -> None:
        parts = [part for part in self._closure(schema) if _describes_items(part)]
        if len(parts) == 1 and parts[0] is schema:
            if isinstance(schema.get("items"), list):
                schema.setdefault("additionalItems", False)
            elif "prefixItems" in schema and "unevaluatedItems" not in schema:
                schema.setdefault("items", False)


def _close(schema: dict[str, Any], names: list[str], patterns: list[str]) -> None:
    if not names:
        return
    for keyword, mentioned in (("properties", names), ("patternProperties", patterns)):
        own = schema.get(keyword, {})
        missing = {name: True for name in mentioned if name not in own}
        if missing:
            schema[keyword] = {**own, **missing}
    schema["additionalProperties"] = False


def _passes_on(schema: dict[str, Any]) -> bool:
    """Whether all that a schema says about properties is said by one other, or one of several."""
    ruling = _RULING & set(schema)
    return ruling in ({"$ref"}, {"anyOf"}) or (ruling == {"allOf"} and len(schema["allOf"]) == 1)


def _describes_items(schema: dict[str, Any]) -> bool:
    return any(k in schema for k in ("items", "prefixItems", "unevaluatedItems", "contains"))


def _below(schema: dict[str, Any]) -> Iterator[Any]:
    """The subschemas that look at parts of the value."""
    here = {id(item) for _, item in in_place(schema)}
    for path, child in children(schema):
        if id(child) not in here and path.split("/")[1] not in DEFINITIONS:
            yield child
