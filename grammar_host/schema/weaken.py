"""Leaving out of a schema what an engine cannot express; the completion gate checks it instead."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from grammar_host.schema.walk import children, local_pointer, referred, subschemas

UNKNOWN_TO_LLGUIDANCE = frozenset(
    {
        "contains",
        "dependencies",
        "dependentRequired",
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
        "unknown",
        "uri",
        "uuid",
    }
)
MAX_TRIALS = 200
"""Compilations that the search for the failing parts of one schema may take."""


def leave_out_unknown(document: Any) -> tuple[Any, list[str]]:
    """Without the keywords and formats that LLGuidance does not know.

    Returns:
        A new document and the JSON pointers of what is missing from it.
    """
    document = copy.deepcopy(document)
    missing = []
    for pointer, node in subschemas(document):
        for keyword in sorted(UNKNOWN_TO_LLGUIDANCE & set(node)):
            del node[keyword]
            missing.append(f"{pointer}/{keyword}")
        if "format" in node and node["format"] not in LLGUIDANCE_FORMATS:
            del node["format"]
            missing.append(f"{pointer}/format")
        if _counts_optional_properties(node):
            for keyword in ("minProperties", "maxProperties"):
                if node.pop(keyword, None) is not None:
                    missing.append(f"{pointer}/{keyword}")
        if referred(document, node) is not None:
            missing.extend(_leave_out_siblings(document, pointer, node))
    return document, missing


def any_for_one(document: Any) -> tuple[Any, list[str]]:
    """With `anyOf` for every `oneOf`; returns a new document and the JSON pointers."""
    document = copy.deepcopy(document)
    missing = []
    for pointer, node in subschemas(document):
        branches = node.pop("oneOf", None)
        if branches is not None:
            node["allOf"] = [*node.get("allOf", ()), {"anyOf": branches}]
            missing.append(f"{pointer}/oneOf")
    return document, missing


def in_any_order(document: Any) -> tuple[Any, list[str]]:
    """With properties in any order, the required ones left to the gate.

    LLGuidance fixes the order of `properties`, but not of names that match `patternProperties`.
    Objects that have both keep their order.

    Returns:
        A new document and the JSON pointers of the `required` that are missing from it.
    """
    document = copy.deepcopy(document)
    missing = []
    for pointer, node in subschemas(document):
        properties = node.get("properties")
        if not isinstance(properties, dict) or not properties or node.get("patternProperties"):
            continue
        del node["properties"]
        node["patternProperties"] = {
            f"^{re.escape(name)}$": properties[name] for name in properties
        }
        if node.pop("required", None):
            missing.append(f"{pointer}/required")
    return document, missing


def leave_out_failing(document: Any, compiles: Callable[[Any], bool]) -> tuple[Any, list[str]]:
    """With `true`, or its bare type, for every smallest subschema that does not compile.

    Args:
        document: a schema that does not compile.
        compiles: whether an engine compiles a schema.

    Returns:
        A new document and the JSON pointers of what is missing from it. It may still not compile,
        if the search took too long.
    """
    document = copy.deepcopy(document)
    return document, _Search(document, compiles).run()


class _Search:
    def __init__(self, document: Any, compiles: Callable[[Any], bool]) -> None:
        self._document = document
        self._compiles = compiles
        self._trials = 0
        self._missing: list[str] = []
        self._visited: set[int] = set()

    def run(self) -> list[str]:
        self._repair("", self._document)
        return self._missing

    def _repair(self, pointer: str, node: Any) -> None:
        if not isinstance(node, dict) or id(node) in self._visited or self._works(pointer):
            return
        self._visited.add(id(node))
        nested = [(pointer + path, child) for path, child in children(node)]
        nested.append((local_pointer(node.get("$ref")) or "", referred(self._document, node)))
        for path, child in nested:
            self._repair(path, child)
        if nested and self._works(pointer):
            return
        kept = {keyword: node[keyword] for keyword in ("type", *_ROOT_KEYWORDS) if keyword in node}
        node.clear()
        node.update(kept)
        self._missing.append(pointer)

    def _works(self, pointer: str) -> bool:
        if self._trials >= MAX_TRIALS:
            return True
        self._trials += 1
        if not pointer:
            return self._compiles(self._document)
        root = self._document
        kept = {keyword: root[keyword] for keyword in _ROOT_KEYWORDS if keyword in root}
        return self._compiles({**kept, "$ref": "#/x-root" + pointer, "x-root": root})


_ROOT_KEYWORDS = ("$schema", "$defs", "definitions")


def _counts_optional_properties(node: dict[str, Any]) -> bool:
    if "minProperties" not in node and "maxProperties" not in node:
        return False
    required = node.get("required", ())
    return any(name not in required for name in node.get("properties", ()))


def _leave_out_siblings(document: Any, pointer: str, node: dict[str, Any]) -> list[str]:
    """A reference in a circle cannot have rules beside it in LLGuidance."""
    beside = sorted(
        keyword for keyword in node if keyword in _RULES_BESIDE_REFERENCES and keyword != "$ref"
    )
    if not beside or not _leads_back(document, node):
        return []
    for keyword in beside:
        del node[keyword]
    return [f"{pointer}/{keyword}" for keyword in beside]


_RULES_BESIDE_REFERENCES = frozenset(
    {
        "type",
        "enum",
        "const",
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "allOf",
        "anyOf",
        "oneOf",
        "minProperties",
        "maxProperties",
    }
)


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
        if start is not None and any(child is start for child in nested):
            return True
        queue.extend(nested)
    return False
