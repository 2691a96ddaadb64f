"""Leaving out of a schema what an engine cannot express; the completion gate checks it instead.

What is weaker is satisfied by every document that satisfied what was there before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from jsonschema_rs.canonical.schema import clone

from grammar_host.schema.removal import Removal
from grammar_host.schema.walk import children, referred, subschemas

Step = Callable[[Any, str, dict[str, Any], Removal], list[str]]
"""Changes one schema of a document in place: the document, the schema's pointer, the schema. Returns
the pointers of what it left out."""


def weaken(document: Any, steps: Iterable[Step]) -> tuple[Any, list[str]]:
    """A copy of a schema that is weaker, and the JSON pointers of what is missing from it.

    Args:
        document: a schema in the words of draft 2020-12 (`grammar_host.schema.rewrite`).
        steps: what to do to every subschema, one after the other.
    """
    document = clone(document)
    missing: list[str] = []
    weaker: list[dict[str, Any]] = []
    for step in steps:
        removal = Removal(document)
        for pointer, node in list(subschemas(document)):
            left_out = step(document, pointer, node, removal)
            if left_out:
                weaker.append(node)
                missing += left_out
        removal.finish()
    # With a weaker branch, `oneOf` would be stronger.
    affected = _affected(document, weaker)
    removal = Removal(document)
    for pointer, node in list(subschemas(document)):
        if any(id(branch) in affected for branch in node.get("oneOf", ())):
            missing += any_for_one(document, pointer, node, removal)
    removal.finish()
    return document, missing


def any_for_one(document: Any, pointer: str, node: dict[str, Any], removal: Removal) -> list[str]:
    """`anyOf` instead of `oneOf`."""
    if "oneOf" not in node:
        return []
    branches = removal.remove(pointer, node, "oneOf")
    if "anyOf" in node:
        node["allOf"] = [*node.get("allOf", ()), {"anyOf": branches}]
    else:
        node["anyOf"] = branches
    return [f"{pointer}/oneOf"]


def in_any_order(document: Any, pointer: str, node: dict[str, Any], removal: Removal) -> list[str]:
    """Properties in any order, the required ones left to the gate.

    LLGuidance fixes the order of `properties`, but not of names that match `patternProperties`.
    Objects that have both keep their order.
    """
    if node.get("properties") and not node.get("patternProperties"):
        properties = removal.remove(pointer, node, "properties")
        node["patternProperties"] = {
            f"^{re.escape(name)}$": rule for name, rule in properties.items()
        }
    # Required names that are not listed have to come first.
    return (
        [] if node.get("properties") or not node.pop("required", None) else [f"{pointer}/required"]
    )


def merge_patterns(
    document: Any, pointer: str, node: dict[str, Any], removal: Removal
) -> list[str]:
    """One rule for all names that match some pattern: LLGuidance wants patterns disjoint."""
    ruled = node.get("patternProperties", {})
    if len(ruled) < 2:
        return []
    removal.remove(pointer, node, "patternProperties")
    either = "|".join(f"(?:{pattern})" for pattern in ruled)
    node["patternProperties"] = {either: {"anyOf": list(ruled.values())}}
    return [f"{pointer}/patternProperties"]


def _affected(document: Any, changed: list[dict[str, Any]]) -> set[int]:
    """The schemas whose meaning depends on one of those that were changed."""
    users: dict[int, list[int]] = {}
    for _, node in subschemas(document):
        used = [child for _, child in children(node)]
        used.append(referred(document, node))
        for item in used:
            users.setdefault(id(item), []).append(id(node))
    affected: set[int] = set()
    queue = [id(node) for node in changed]
    while queue:
        node_id = queue.pop()
        if node_id not in affected:
            affected.add(node_id)
            queue.extend(users.get(node_id, ()))
    return affected
