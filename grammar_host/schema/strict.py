"""Closing a schema: what it does not mention is not allowed."""

from __future__ import annotations

from typing import Any

from grammar_host.schema.walk import (
    IN_PLACE_LISTS,
    IN_PLACE_SINGLES,
    referred,
    subschemas,
)

_OPENING = ("additionalProperties", "unevaluatedProperties")
_RULING = (
    *IN_PLACE_LISTS,
    *IN_PLACE_SINGLES,
    "dependencies",
    "dependentSchemas",
    "patternProperties",
    "properties",
)
"""Keywords beside a `$ref` that make it one part of several."""


def close_objects(document: dict[str, Any]) -> None:
    """Forbids unmentioned properties and items, in place.

    An object that mentions a property gets `additionalProperties: false`, where the properties of
    all the branches that describe the same object (`allOf`, `anyOf`, `$ref`, ...) count as
    mentioned; one that mentions none, or says `additionalProperties` itself, stays as it is. So
    does the rest of an array, unless it has `prefixItems`.

    Properties of branches are added as `true`: the branches still rule their values.
    """
    parts = _parts(document)
    mentions = {
        id(schema): _mentions(document, schema)
        for _, schema in subschemas(document)
        if id(schema) not in parts
    }
    for _, schema in list(subschemas(document)):
        target = _pure_target(document, schema)
        if target is not None:
            # Closed where it stands, unless others build on it: then the reference is closed.
            if id(target) not in parts or id(schema) in parts:
                continue
            schema["allOf"] = [{"$ref": schema.pop("$ref")}]
            mentions[id(schema)] = _mentions(document, schema)
        if isinstance(schema.get("prefixItems"), list):
            schema.setdefault("items", False)
        elif isinstance(schema.get("items"), list):
            schema.setdefault("additionalItems", False)
        names, patterns, says_itself = mentions.get(id(schema), ((), (), True))
        if says_itself or not names:
            continue
        own = schema.get("properties", {})
        schema["properties"] = {**own, **{name: True for name in names if name not in own}}
        ruled = schema.get("patternProperties", {})
        missing = {pattern: True for pattern in patterns if pattern not in ruled}
        if missing:
            schema["patternProperties"] = {**ruled, **missing}
        schema["additionalProperties"] = False


def _parts(document: dict[str, Any]) -> set[int]:
    """The schemas that describe the same instance as another one that names them."""
    return {
        id(part) for _, schema in subschemas(document) for part in _same_instance(document, schema)
    }


def _same_instance(document: Any, schema: dict[str, Any]) -> list[Any]:
    parts: list[Any] = []
    for keyword in IN_PLACE_LISTS:
        value = schema.get(keyword)
        parts.extend(value if isinstance(value, list) else ())
    # What `not` mentions is not allowed for being mentioned.
    parts.extend(schema[keyword] for keyword in IN_PLACE_SINGLES[1:] if keyword in schema)
    for keyword in ("dependentSchemas", "dependencies"):
        value = schema.get(keyword)
        parts.extend(value.values() if isinstance(value, dict) else ())
    if _pure_target(document, schema) is None:
        parts.append(referred(document, schema))
    return [part for part in parts if isinstance(part, dict)]


def _pure_target(document: Any, schema: dict[str, Any]) -> dict[str, Any] | None:
    """What the schema stands for, if it is a reference and nothing else."""
    target = referred(document, schema)
    if not isinstance(target, dict) or any(keyword in schema for keyword in _RULING):
        return None
    return target


def _mentions(document: Any, schema: dict[str, Any]) -> tuple[list[str], list[str], bool]:
    """Property names, patterns, and whether some part says itself what else is allowed."""
    names: dict[str, None] = {}
    patterns: dict[str, None] = {}
    says_itself = False
    seen: set[int] = set()
    queue = [schema]
    while queue:
        part = queue.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        for keyword, found in (("properties", names), ("patternProperties", patterns)):
            value = part.get(keyword)
            found.update(dict.fromkeys(value if isinstance(value, dict) else ()))
        says_itself = says_itself or any(keyword in part for keyword in _OPENING)
        queue.extend(_same_instance(document, part))
        target = _pure_target(document, part)
        if target is not None and part is not schema:
            queue.append(target)
    return list(names), list(patterns), says_itself
