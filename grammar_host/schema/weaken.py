"""Leaving out of a schema what an engine cannot express; the completion gate checks it instead.

Every function takes a schema in the words of draft 2020-12 (`grammar_host.schema.rewrite`) and
returns a new one that every valid document satisfies, with the JSON pointers of what is missing.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from grammar_host.schema.removal import Removal
from grammar_host.schema.walk import children, escape, referred, subschemas

UNKNOWN_TO_LLGUIDANCE = frozenset(
    {
        "contains",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
MAX_EXACT = 2**53
"""From here on floats are no longer exact."""

_HOLD_NUMBERS = (
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "maximum",
    "minimum",
    "multipleOf",
)

LLGUIDANCE_FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "uri",
        "uuid",
    }
)


def leave_out_unknown(document: Any) -> tuple[Any, list[str]]:
    """Without the keywords and formats that LLGuidance does not know or cannot combine."""
    document = copy.deepcopy(document)
    removal = Removal(document)
    missing = []
    for pointer, node in list(subschemas(document)):
        for keyword in list(_unknown_keywords(node)):
            removal.remove(pointer, node, keyword)
            missing.append(f"{pointer}/{keyword}")
        missing.extend(f"{pointer}{path}" for path in _leave_out_overlaps(node))
    removal.finish()
    return document, missing


def leave_out_large_numbers(document: Any) -> tuple[Any, list[str]]:
    """Without numbers that LLGuidance, which computes in floats, would round (or crash on)."""
    document = copy.deepcopy(document)
    removal = Removal(document)
    missing = []
    for pointer, node in list(subschemas(document)):
        for keyword in _HOLD_NUMBERS:
            if keyword in node and _has_large_number(node[keyword]):
                removal.remove(pointer, node, keyword)
                missing.append(f"{pointer}/{keyword}")
    removal.finish()
    return document, missing


def _has_large_number(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_large_number, value.values()))
    if isinstance(value, list):
        return any(map(_has_large_number, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) >= MAX_EXACT or "e" in repr(value)


def any_for_one(document: Any) -> tuple[Any, list[str]]:
    """With `anyOf` for every `oneOf`."""
    document = copy.deepcopy(document)
    removal = Removal(document)
    missing = []
    for pointer, node in list(subschemas(document)):
        if "oneOf" in node:
            branches = removal.remove(pointer, node, "oneOf")
            node["allOf"] = [*node.get("allOf", ()), {"anyOf": branches}]
            missing.append(f"{pointer}/oneOf")
    removal.finish()
    return document, missing


def in_any_order(document: Any) -> tuple[Any, list[str]]:
    """With properties in any order, the required ones left to the gate.

    LLGuidance fixes the order of `properties`, but not of names that match `patternProperties`.
    Objects that have both keep their order.
    """
    document = copy.deepcopy(document)
    removal = Removal(document)
    missing = []
    for pointer, node in list(subschemas(document)):
        if not node.get("properties") or node.get("patternProperties"):
            continue
        properties = removal.remove(pointer, node, "properties")
        node["patternProperties"] = {
            f"^{re.escape(name)}$": properties[name] for name in properties
        }
        if node.pop("required", None):
            missing.append(f"{pointer}/required")
    removal.finish()
    return document, missing


def leave_out_beside_circles(document: Any) -> tuple[Any, list[str]]:
    """Without what stands beside a reference that leads in a circle, which LLGuidance refuses."""
    document = copy.deepcopy(document)
    removal = Removal(document)
    missing = []
    for pointer, node in list(subschemas(document)):
        circle = _circle(document, node)
        beside = sorted(_RULES & set(node))
        if circle is None or not beside:
            continue
        for keyword in beside:
            removal.remove(pointer, node, keyword)
            missing.append(f"{pointer}/{keyword}")
        node["$ref"] = circle
    removal.finish()
    return document, missing


def _unknown_keywords(node: dict[str, Any]) -> Iterator[str]:
    yield from sorted(UNKNOWN_TO_LLGUIDANCE & set(node))
    if "format" in node and node["format"] not in LLGUIDANCE_FORMATS:
        yield "format"
    required = node.get("required", ())
    if any(name not in required for name in node.get("properties", ())):
        # LLGuidance counts additional properties only.
        yield from (keyword for keyword in ("minProperties", "maxProperties") if keyword in node)


def _leave_out_overlaps(node: dict[str, Any]) -> list[str]:
    """Rules for names by pattern, where a listed name matches, too: both would have to hold."""
    ruled, properties = node.get("patternProperties", {}), node.get("properties", {})
    overlapping = [
        pattern
        for pattern, schema in ruled.items()
        if schema is not True and any(_may_match(pattern, name) for name in properties)
    ]
    if overlapping:
        node["patternProperties"] = {**ruled, **dict.fromkeys(overlapping, True)}
    return [f"/patternProperties/{escape(pattern)}" for pattern in overlapping]


def _may_match(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:  # another dialect
        return True


_RULES = frozenset(
    {
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "items",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "required",
        "type",
    }
)
"""What LLGuidance intersects with what it finds beside it."""


def _circle(document: Any, node: dict[str, Any]) -> str | None:
    """The reference of a schema, or of a branch of its `allOf`, that leads back to itself."""
    for branch in (node, *node.get("allOf", ())):
        if isinstance(branch, dict) and "$ref" in branch and _leads_back(document, branch):
            return str(branch["$ref"])
    return None


def _leads_back(document: Any, node: dict[str, Any]) -> bool:
    """Whether what the node refers to refers to itself, directly or not."""
    start = referred(document, node)
    seen: set[int] = set()
    queue = [start]
    while queue:
        node = queue.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        nested = [child for _, child in children(node)]
        nested.append(referred(document, node))
        if any(child is start for child in nested):
            return True
        queue.extend(nested)
    return False
