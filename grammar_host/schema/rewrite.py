"""Rewrites that keep the language of a schema and let engines see more of it."""

from __future__ import annotations

import copy
from typing import Any

from grammar_host.schema.patterns import to_rust
from grammar_host.schema.reading import Schema, knows_format
from grammar_host.schema.walk import local_pointer, subschemas

MAX_CONDITIONS = 4
"""Dependencies of one schema that are worked out; each doubles the alternatives."""

_BESIDE_REFERENCES = frozenset({"$ref", "$defs", "definitions", "$schema", "$id", "id"})


def simplify(schema: Schema) -> Any:
    """The schema in words that engines know better; nothing about its language changes.

    - Formats that the draft does not define are annotations, so they go.
    - Up to draft 7, keywords beside `$ref` count for nothing, so they go.
    - `dependencies`, `dependentRequired`, `dependentSchemas` become `anyOf`: either the property
      is absent, or what depends on it holds.
    - `x-guidance` would be read by LLGuidance as options, so it goes.

    Returns:
        A new document.
    """
    document = copy.deepcopy(schema.document)
    for _, node in subschemas(document):
        node.pop("x-guidance", None)
        if schema.draft <= 7 and _leads_to_a_definition(node.get("$ref")):
            for keyword in set(node) - _BESIDE_REFERENCES:
                del node[keyword]
            continue
        name = node.get("format")
        if "format" in node and not (isinstance(name, str) and knows_format(schema.draft, name)):
            del node["format"]
        _split_dependencies(node)
    return document


def lower_for_llguidance(document: Any) -> Any:
    """A copy for LLGuidance: patterns in its dialect, `propertyNames` as `patternProperties`."""
    document = copy.deepcopy(document)
    for _, node in subschemas(document):
        _lower_property_names(node)
        if isinstance(node.get("pattern"), str):
            node["pattern"] = to_rust(node["pattern"])
        ruled = node.get("patternProperties")
        if isinstance(ruled, dict):
            node["patternProperties"] = {to_rust(name): item for name, item in ruled.items()}
    return document


def _leads_to_a_definition(reference: Any) -> bool:
    # References may lead into any other keyword of the same schema, which must stay then.
    pointer = local_pointer(reference)
    return pointer is not None and pointer.startswith(("/definitions/", "/$defs/"))


def _split_dependencies(node: dict[str, Any]) -> None:
    conditions: list[tuple[str, Any]] = []
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        value = node.get(keyword)
        for name, needed in value.items() if isinstance(value, dict) else ():
            conditions.append((name, {"required": needed} if isinstance(needed, list) else needed))
    if not 0 < len(conditions) <= MAX_CONDITIONS:
        return
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        node.pop(keyword, None)
    either = [{"anyOf": [{"properties": {name: False}}, needed]} for name, needed in conditions]
    node["allOf"] = [*node.get("allOf", ()), *either]


def _lower_property_names(node: dict[str, Any]) -> None:
    """`propertyNames: {pattern}` alone: every other name leads to `additionalProperties: false`."""
    rule = node.get("propertyNames")
    if not isinstance(rule, dict) or node.get("patternProperties"):
        return
    names = {keyword: value for keyword, value in rule.items() if not keyword.startswith("$")}
    if names.pop("type", "string") != "string" or set(names) != {"pattern"}:
        return
    if node.get("properties"):
        return  # the listed names would have to match, too
    del node["propertyNames"]
    node["patternProperties"] = {names["pattern"]: node.get("additionalProperties", True)}
    node["additionalProperties"] = False
