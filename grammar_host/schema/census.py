"""Which keywords of a schema an engine enforces exactly, so that no gate is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grammar_host.schema.walk import subschemas
from grammar_host.schema.weaken import UNKNOWN_TO_LLGUIDANCE

ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "$vocabulary",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "examples",
        "id",
        "readOnly",
        "title",
        "writeOnly",
    }
)
"""Keywords that describe and do not constrain."""

_KEYWORDS = ANNOTATIONS | frozenset(
    {
        "$ref",
        "additionalItems",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "if",
        "items",
        "maxContains",
        "maximum",
        "maxItems",
        "maxLength",
        "maxProperties",
        "minContains",
        "minimum",
        "minItems",
        "minLength",
        "minProperties",
        "multipleOf",
        "not",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "propertyNames",
        "required",
        "then",
        "type",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
        "$dynamicRef",
        "$recursiveRef",
        "$dynamicAnchor",
        "$recursiveAnchor",
    }
)

_EXACT_FORMATS = frozenset({"ipv4", "uuid"})
"""The others have rules that regular expressions miss: leap years, lengths of labels, ..."""

_XGRAMMAR_EXACT = ANNOTATIONS | frozenset(
    {
        "$ref",
        "additionalProperties",
        "anyOf",
        "const",
        "enum",
        "items",
        "maxItems",
        "maxLength",
        "minItems",
        "minLength",
        "prefixItems",
        "properties",
        "required",
        "type",
    }
)


def inexact_keywords(document: Any, backend: str) -> list[str]:
    """JSON pointers of what an engine is not known to enforce exactly in a schema."""
    inexact = INEXACT[backend]
    return [
        f"{pointer}/{keyword}"
        for pointer, node in subschemas(document)
        for keyword in node
        if keyword in _KEYWORDS and inexact(node, keyword)
    ]


def _llguidance(node: dict[str, Any], keyword: str) -> bool:
    # LLGuidance refuses what it cannot enforce; what is listed here it only approximates.
    if keyword == "format":
        return node["format"] not in _EXACT_FORMATS
    return keyword in UNKNOWN_TO_LLGUIDANCE


def _xgrammar(node: dict[str, Any], keyword: str) -> bool:
    if keyword in ("minLength", "maxLength"):
        return "pattern" in node or "format" in node
    return keyword not in _XGRAMMAR_EXACT


def _exact(node: dict[str, Any], keyword: str) -> bool:
    return False  # Outlines' adapter compiles only what it enforces


INEXACT: Mapping[str, Callable[[dict[str, Any], str], bool]] = {
    "llguidance": _llguidance,
    "outlines": _exact,
    "xgrammar": _xgrammar,
}
