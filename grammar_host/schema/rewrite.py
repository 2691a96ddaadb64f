"""Rewrites that keep the language of a schema and let engines see more of it."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from grammar_host.schema.patterns import to_rust
from grammar_host.schema.removal import Removal
from grammar_host.schema.walk import subschemas

MAX_CONDITIONS = 4
"""Dependencies of one schema that are worked out; each doubles the alternatives."""

_NEWEST = "https://json-schema.org/draft/2020-12/schema"


def modernize(document: Any) -> Any:
    """A copy in the words of draft 2020-12, with dependencies worked out.

    - `items` and `additionalItems` of tuples become `prefixItems` and `items`, `dependencies`
      become `dependentRequired` and `dependentSchemas`, bounds that are `exclusive: true` become
      exclusive ones.
    - Dependencies become `anyOf`: either the property is absent, or what depends on it holds.

    Up to draft 4, 1.0 was no integer; now it is.

    Args:
        document: a `Schema.document` or a `Schema.canonical`.
    """
    document = copy.deepcopy(document)
    removal = Removal(document)
    nodes = list(subschemas(document))
    split = not _looks_at_evaluation(node for _, node in nodes)
    for pointer, node in nodes:
        _modernize_tuple(removal, pointer, node)
        _modernize_bounds(node)
        conditions = _conditions(removal, pointer, node)
        if not conditions:
            continue
        rules: list[dict[str, Any]]
        if split and len(conditions) <= MAX_CONDITIONS:
            rules = [{"anyOf": [{"properties": {name: False}}, rule]} for name, rule in conditions]
        else:
            rules = [{"dependentSchemas": {name: rule}} for name, rule in conditions]
        node["allOf"] = [*node.get("allOf", ()), *rules]
    removal.finish()
    if isinstance(document, dict):
        document["$schema"] = _NEWEST
    return document


def lower_for_llguidance(document: Any) -> Any:
    """A copy for LLGuidance: patterns in its dialect, `propertyNames` as `patternProperties`.

    Args:
        document: what `modernize` returned.
    """
    document = copy.deepcopy(document)
    removal = Removal(document)
    nodes = list(subschemas(document))
    lower_names = not _looks_at_evaluation(node for _, node in nodes)
    for pointer, node in nodes:
        if lower_names:
            _lower_property_names(removal, pointer, node)
        if "pattern" in node:
            node["pattern"] = to_rust(node["pattern"])
        if "patternProperties" in node:
            ruled = removal.remove(pointer, node, "patternProperties")
            lowered: dict[str, Any] = {}
            for name, rule in ruled.items():
                name = to_rust(name)
                lowered[name] = {"allOf": [lowered[name], rule]} if name in lowered else rule
            node["patternProperties"] = lowered
    removal.finish()
    return document


def _looks_at_evaluation(nodes: Iterable[dict[str, Any]]) -> bool:
    """Whether some schema asks which parts others have looked at, which rewrites may change."""
    keywords = ("unevaluatedItems", "unevaluatedProperties")
    return any(keyword in node for node in nodes for keyword in keywords)


def _modernize_tuple(removal: Removal, pointer: str, node: dict[str, Any]) -> None:
    if isinstance(node.get("items"), list):
        node["prefixItems"] = removal.remove(pointer, node, "items")
        if "additionalItems" in node:
            node["items"] = removal.remove(pointer, node, "additionalItems")


def _modernize_bounds(node: dict[str, Any]) -> None:
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        value = node.get(exclusive)
        if isinstance(value, bool):
            del node[exclusive]
            if value and inclusive in node:
                node[exclusive] = node.pop(inclusive)


def _conditions(removal: Removal, pointer: str, node: dict[str, Any]) -> list[tuple[str, Any]]:
    """Takes the dependencies out: names, and what holds where they are present."""
    conditions: list[tuple[str, Any]] = []
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        if keyword in node:
            for name, rule in removal.remove(pointer, node, keyword).items():
                needed = {"required": rule} if isinstance(rule, list) else rule
                conditions.append((name, needed))
    return conditions


def _lower_property_names(removal: Removal, pointer: str, node: dict[str, Any]) -> None:
    """`propertyNames: {pattern}` alone: every other name leads to `additionalProperties: false`."""
    rule = node.get("propertyNames")
    if not isinstance(rule, dict) or node.get("patternProperties") or node.get("properties"):
        return  # the listed names would have to match, too
    if rule.get("type", "string") != "string" or {*rule} - {"type"} != {"pattern"}:
        return
    removal.remove(pointer, node, "propertyNames")
    values = removal.remove(pointer, node, "additionalProperties") if _has_rest(node) else True
    node["patternProperties"] = {rule["pattern"]: values}
    node["additionalProperties"] = False


def _has_rest(node: dict[str, Any]) -> bool:
    return "additionalProperties" in node
