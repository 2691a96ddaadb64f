"""Property order: what a model writes first matters, and some engines fix it.

The canonical form of a schema lists properties alphabetically, each only where it says something
about it; here they get the order back in which the caller's schema mentions them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from grammar_host.schema.walk import (
    DEFINITIONS,
    IN_PLACE_LISTS,
    IN_PLACE_SINGLES,
    children,
    in_place,
    local_pointer,
    referred,
    resolve,
    unescape,
)

_CANONICAL = "urn:jsonschema:canonical:"
"""Prefix of the names that jsonschema_rs gives to definitions of its own making."""

_REST = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_ITEMS = ("additionalItems", "contains", "items", "prefixItems", "unevaluatedItems")


def restore_property_order(canonical: Any, original: Any) -> tuple[Any, bool]:
    """A copy of `canonical` whose objects have the property order of `original`.

    Walks both along the same instances: an object of the canonical form is described by all the
    original schemas that apply to it, and their properties count in document order. Where the
    canonical form leaves a name out, it is added as what the rest of the object is.

    Returns:
        The copy, and whether the original gives an order to all names that the copy orders.
    """
    restoration = _Restoration(canonical, original)
    return restoration.run(), restoration.is_complete


@dataclass
class _InTurn:
    """A schema whose parts have been looked at."""

    schema: dict[str, Any]


class _Restoration:
    def __init__(self, canonical: Any, original: Any) -> None:
        self._canonical = canonical
        self._original = original
        self.is_complete = True

    def run(self) -> Any:
        result = self._schema(self._canonical, self._closure([self._original]))
        for keyword in DEFINITIONS:
            definitions = result.get(keyword, {}) if isinstance(result, dict) else {}
            for name, definition in definitions.items():
                sources = self._sources_of_definition(keyword, name)
                definitions[name] = self._schema(definition, self._closure(sources))
        return result

    def _sources_of_definition(self, keyword: str, name: str) -> list[Any]:
        """The original schema that a definition of the canonical form stands for."""
        pointer = f"/{keyword}/{name}"
        if name.startswith(_CANONICAL):
            fragment = unquote(name.removeprefix(_CANONICAL)).partition("#")[2]
            pointer = local_pointer(f"#{fragment}") or ""
        try:
            return [resolve(self._original, pointer)]
        except KeyError:
            return []

    def _closure(self, schemas: list[Any]) -> list[dict[str, Any]]:
        """The schemas and everything that applies to the same instance, in document order."""
        closure: list[dict[str, Any]] = []
        seen: set[int] = set()
        queue: list[Any] = [*schemas]
        while queue:
            schema = queue.pop(0)
            if isinstance(schema, _InTurn):
                closure.append(schema.schema)
            elif isinstance(schema, dict) and id(schema) not in seen:
                seen.add(id(schema))
                queue = [*self._parts_in_order(schema), *queue]
        return closure

    def _parts_in_order(self, schema: dict[str, Any]) -> list[Any]:
        """The schema between the parts that stand before and behind its own properties."""
        parts: list[Any] = []
        for keyword, value in schema.items():
            if keyword == "properties":
                parts.append(_InTurn(schema))
            elif keyword == "$ref":
                parts.append(referred(self._original, schema))
            else:
                parts.extend(item for _, item in in_place({keyword: value}))
        return parts if "properties" in schema else [_InTurn(schema), *parts]

    def _schema(self, node: Any, sources: list[dict[str, Any]]) -> Any:
        if not isinstance(node, dict):
            return node
        result = dict(node)
        for keyword, value in node.items():
            if keyword in DEFINITIONS:
                result[keyword] = dict(value)
            elif keyword in IN_PLACE_LISTS:
                result[keyword] = [self._schema(item, sources) for item in value]
            elif keyword in IN_PLACE_SINGLES:
                result[keyword] = self._schema(value, sources)
            elif keyword in _REST and keyword != "patternProperties":
                result[keyword] = self._schema(value, self._below(sources, _REST))
            elif keyword == "patternProperties":
                below = self._below(sources, ("properties", *_REST))
                result[keyword] = {name: self._schema(item, below) for name, item in value.items()}
            elif keyword in _ITEMS:
                below = self._below(sources, _ITEMS)
                items = value if isinstance(value, list) else [value]
                restored = [self._schema(item, below) for item in items]
                result[keyword] = restored if isinstance(value, list) else restored[0]
        if "properties" in result or "required" in result:
            self._order(result, sources)
        return result

    def _order(self, node: dict[str, Any], sources: list[dict[str, Any]]) -> None:
        """Orders the properties of one object of the canonical form."""
        rank: dict[str, int] = {}
        for source in sources:
            for name in source.get("properties", ()):
                rank.setdefault(name, len(rank))
        properties = node.get("properties", {})
        required = node.get("required", [])
        ordered = dict.fromkeys([*properties, *required])
        if len(ordered) > 1 and not ordered.keys() <= rank.keys():
            self.is_complete = False
        if rank and "patternProperties" not in node and "unevaluatedProperties" not in node:
            rest = node.get("additionalProperties", True)
            properties = {**dict.fromkeys(rank, rest), **properties}
        node["properties"] = {
            name: self._schema(properties[name], self._closure(_named(sources, name)))
            for name in sorted(properties, key=lambda name: rank.get(name, len(rank)))
        }
        if required:
            node["required"] = sorted(required, key=lambda name: rank.get(name, len(rank)))

    def _below(
        self, sources: list[dict[str, Any]], keywords: tuple[str, ...]
    ) -> list[dict[str, Any]]:
        """What describes the items, or the values of properties without a name of their own."""
        below = [
            child
            for source in sources
            for path, child in children(source)
            if unescape(path.split("/")[1]) in keywords
        ]
        return self._closure(below)


def _named(sources: list[dict[str, Any]], name: str) -> list[Any]:
    found = []
    for source in sources:
        if name in source.get("properties", ()):
            found.append(source["properties"][name])
        elif "additionalProperties" in source:
            found.append(source["additionalProperties"])
    return found
