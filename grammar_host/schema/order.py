"""Property order: what a model writes first matters, and some engines fix it.

The canonical form of a schema lists properties alphabetically; here they get the order back in
which the caller's schema mentions them.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from grammar_host.schema.walk import (
    IN_PLACE_LISTS,
    IN_PLACE_SINGLES,
    children,
    escape,
    local_pointer,
    referred,
    resolve,
)

_CANONICAL = "urn:jsonschema:canonical:"
_ROOT = "json-schema:///"


def restore_property_order(canonical: Any, original: Any) -> Any:
    """A copy of `canonical` whose `properties` have the order of `original`.

    Walks both along the same instances: an object of the canonical form is described by all the
    original schemas that apply to it, and their properties count in document order.
    """
    return _Restoration(canonical, original).run()


class _Restoration:
    def __init__(self, canonical: Any, original: Any) -> None:
        self._canonical = canonical
        self._original = original

    def run(self) -> Any:
        result = self._schema(self._canonical, self._closure([self._original]))
        for keyword in ("$defs", "definitions"):
            for name in result.get(keyword, ()) if isinstance(result, dict) else ():
                sources = self._sources_of_definition(keyword, name)
                result[keyword][name] = self._schema(
                    self._canonical[keyword][name], self._closure(sources)
                )
        return result

    def _sources_of_definition(self, keyword: str, name: str) -> list[Any]:
        """The original schema that a definition of the canonical form stands for."""
        pointer = f"/{keyword}/{escape(name)}"
        if name.startswith(_CANONICAL):
            reference = unquote(name[len(_CANONICAL) :])
            pointer = local_pointer("#" + reference.partition("#")[2]) or ""
        try:
            return [resolve(self._original, pointer)]
        except KeyError:
            return []

    def _closure(self, schemas: list[Any]) -> list[dict[str, Any]]:
        """The schemas and everything that applies to the same instance, in document order."""
        closure: list[dict[str, Any]] = []
        seen: set[int] = set()

        def add(schema: Any) -> None:
            if not isinstance(schema, dict) or id(schema) in seen:
                return
            seen.add(id(schema))
            closure.append(schema)
            for keyword, value in schema.items():
                if keyword in IN_PLACE_LISTS and isinstance(value, list):
                    for item in value:
                        add(item)
                elif keyword in IN_PLACE_SINGLES:
                    add(value)
                elif keyword in ("dependentSchemas", "dependencies") and isinstance(value, dict):
                    for item in value.values():
                        add(item)
                elif keyword == "$ref":
                    add(referred(self._original, schema))

        for schema in schemas:
            add(schema)
        return closure

    def _schema(self, node: Any, sources: list[dict[str, Any]]) -> Any:
        if not isinstance(node, dict):
            return node
        result = dict(node)
        for keyword, value in node.items():
            if keyword in ("$defs", "definitions"):
                result[keyword] = dict(value) if isinstance(value, dict) else value
            elif keyword == "properties" and isinstance(value, dict):
                result[keyword] = self._properties(value, sources)
            elif keyword in IN_PLACE_LISTS and isinstance(value, list):
                result[keyword] = [self._schema(item, sources) for item in value]
            elif keyword in IN_PLACE_SINGLES:
                result[keyword] = self._schema(value, sources)
            elif keyword in ("items", "additionalProperties", "contains", "additionalItems"):
                result[keyword] = self._schema(value, self._below(sources, keyword))
            elif keyword in ("prefixItems", "patternProperties"):
                result[keyword] = self._nested(value, self._below(sources, keyword))
        return result

    def _properties(self, value: dict[str, Any], sources: list[dict[str, Any]]) -> dict[str, Any]:
        rank: dict[str, int] = {}
        for source in sources:
            mentioned = source.get("properties")
            for name in mentioned if isinstance(mentioned, dict) else ():
                rank.setdefault(name, len(rank))
        ordered = sorted(value, key=lambda name: rank.get(name, len(rank)))
        return {
            name: self._schema(value[name], self._closure(_named(sources, name)))
            for name in ordered
        }

    def _below(self, sources: list[dict[str, Any]], keyword: str) -> list[dict[str, Any]]:
        """What describes the items, or the values of properties without a name of their own."""
        wanted = (
            ("additionalProperties", "patternProperties")
            if keyword in ("additionalProperties", "patternProperties")
            else ("items", "prefixItems", "additionalItems", "contains")
        )
        below = [
            child
            for source in sources
            for path, child in children(source)
            if path.split("/")[1] in wanted
        ]
        return self._closure(below)

    def _nested(self, value: Any, sources: list[dict[str, Any]]) -> Any:
        if isinstance(value, dict):
            return {name: self._schema(item, sources) for name, item in value.items()}
        return [self._schema(item, sources) for item in value]


def _named(sources: list[dict[str, Any]], name: str) -> list[Any]:
    found = []
    for source in sources:
        properties = source.get("properties")
        if isinstance(properties, dict) and name in properties:
            found.append(properties[name])
        elif "additionalProperties" in source:
            found.append(source["additionalProperties"])
    return found
