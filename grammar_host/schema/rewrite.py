"""Rewrites that keep the language of a schema and let engines see more of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from jsonschema_rs.canonical.schema import clone

from grammar_host.schema.patterns import to_rust
from grammar_host.schema.removal import Removal
from grammar_host.schema.walk import KEYWORDS, subschemas

MAX_CONDITIONS = 4
"""Dependencies of one schema that are worked out; each doubles the alternatives."""

_NEWEST = "https://json-schema.org/draft/2020-12/schema"


def modernize(document: Any) -> Any:
    """A copy in the words of draft 2020-12, with dependencies worked out.

    - `items` and `additionalItems` of tuples become `prefixItems` and `items`, `dependencies`
      become `dependentRequired` and `dependentSchemas`, bounds that are `exclusive: true` become
      exclusive ones.
    - `propertyNames` with an `enum` or a `const` of listed properties becomes
      `additionalProperties: false`.
    - Dependencies become `anyOf`: either the property is absent, or what depends on it holds. Not
      where that would give an order to properties that have none.

    Up to draft 4, 1.0 was no integer; now it is.

    Args:
        document: a `Schema.document` or a `Schema.canonical`.
    """
    document = clone(document)
    removal = Removal(document)
    nodes = list(subschemas(document))
    split = not _looks_at_evaluation(node for _, node in nodes)
    for pointer, node in nodes:
        _modernize_tuple(removal, pointer, node)
        _modernize_bounds(node)
        if split:
            _list_names(removal, pointer, node)
        conditions = _conditions(removal, pointer, node)
        rules: list[dict[str, Any]]
        if split and len(conditions) <= MAX_CONDITIONS and _keep_order(node, conditions):
            rules = [{"anyOf": [{"properties": {name: False}}, rule]} for name, rule in conditions]
        else:
            rules = [{"dependentSchemas": {name: rule}} for name, rule in conditions]
        if rules:
            node["allOf"] = [*node.get("allOf", ()), *rules]
    removal.finish()
    if isinstance(document, dict):
        document["$schema"] = _NEWEST
    return document


def lower_for_llguidance(document: Any) -> Any:
    """A copy for LLGuidance.

    - Patterns are written in its dialect.
    - `propertyNames` with a pattern becomes `patternProperties`.
    - Exclusive bounds of integers become inclusive ones.

    Args:
        document: what `modernize` returned.
    """
    document = clone(document)
    removal = Removal(document)
    nodes = list(subschemas(document))
    lower_names = not _looks_at_evaluation(node for _, node in nodes)
    for pointer, node in nodes:
        if node.get("type") == "integer":
            _include_bounds(node)
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


def _include_bounds(node: dict[str, Any]) -> None:
    lowest = [math.ceil(node["minimum"])] if "minimum" in node else []
    highest = [math.floor(node["maximum"])] if "maximum" in node else []
    if "exclusiveMinimum" in node:
        lowest.append(math.floor(node.pop("exclusiveMinimum")) + 1)
    if "exclusiveMaximum" in node:
        highest.append(math.ceil(node.pop("exclusiveMaximum")) - 1)
    if lowest:
        node["minimum"] = max(lowest)
    if highest:
        node["maximum"] = min(highest)


def _conditions(removal: Removal, pointer: str, node: dict[str, Any]) -> list[tuple[str, Any]]:
    """Takes the dependencies out: names, and what holds where they are present."""
    conditions: list[tuple[str, Any]] = []
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        if keyword in node:
            for name, rule in removal.remove(pointer, node, keyword).items():
                needed = {"required": rule} if isinstance(rule, list) else rule
                conditions.append((name, needed))
    return conditions


def _keep_order(node: dict[str, Any], conditions: list[tuple[str, Any]]) -> bool:
    """Whether the schema itself lists, and so orders, all the names of its dependencies."""
    names = {name for name, _ in conditions}
    for _, rule in conditions:
        if isinstance(rule, dict):
            names.update(rule.get("properties", ()), rule.get("required", ()))
    return names <= set(node.get("properties", ()))


def _list_names(removal: Removal, pointer: str, node: dict[str, Any]) -> None:
    """Names are enumerated that all have rules already: others are not allowed."""
    names, listed = _enumerated_names(node), node.get("properties", {})
    if names is None or not names <= listed.keys():
        return  # the others would be given an order that they do not have
    removal.remove(pointer, node, "propertyNames")
    _rest(removal, pointer, node)
    if names < listed.keys():
        removal.remove(pointer, node, "properties")
        node["properties"] = {name: name in names and rule for name, rule in listed.items()}
    node["additionalProperties"] = False


def _lower_property_names(removal: Removal, pointer: str, node: dict[str, Any]) -> None:
    """Other names than those that match lead to `additionalProperties: false`."""
    if node.get("properties") or node.get("patternProperties"):
        return  # those would have to match, too
    names = _enumerated_names(node)
    rule = node.get("propertyNames", False)
    if names is not None:
        pattern = f"^(?:{'|'.join(map(re.escape, sorted(names)))})$"
    elif isinstance(rule, dict) and KEYWORDS & rule.keys() in ({"pattern"}, {"pattern", "type"}):
        if rule.get("type", "string") != "string":
            return
        pattern = rule["pattern"]
    else:
        return
    removal.remove(pointer, node, "propertyNames")
    node["patternProperties"] = {pattern: _rest(removal, pointer, node)}
    node["additionalProperties"] = False


def _enumerated_names(node: dict[str, Any]) -> set[str] | None:
    """The names that `propertyNames` allows, if it lists them and nothing else rules names."""
    rule = node.get("propertyNames")
    if not isinstance(rule, dict) or node.get("patternProperties"):
        return None
    keywords = (KEYWORDS & rule.keys()) - {"type"}
    if keywords not in ({"const"}, {"enum"}) or rule.get("type", "string") != "string":
        return None
    # The canonical form writes a single name as `const`.
    names = rule["enum"] if "enum" in rule else [rule["const"]]
    return {name for name in names if isinstance(name, str)}


def _rest(removal: Removal, pointer: str, node: dict[str, Any]) -> Any:
    """Takes `additionalProperties` out; returns what it was."""
    if "additionalProperties" in node:
        return removal.remove(pointer, node, "additionalProperties")
    return True
