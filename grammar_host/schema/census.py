"""Which keywords of a schema an engine enforces exactly, so that no gate is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from grammar_host.schema.walk import subschemas
from grammar_host.schema.weaken import UNKNOWN_TO_LLGUIDANCE

KEYWORDS = frozenset(
    {
        "$ref",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "contains",
        "dependentSchemas",
        "else",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "if",
        "items",
        "maxContains",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minContains",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
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
    }
)
"""What constrains documents, in the words that `grammar_host.schema.rewrite` leaves."""

_EXACT_FORMATS = frozenset({"ipv4", "uuid"})
"""The others have rules that regular expressions miss: leap years, lengths of labels, ..."""

_XGRAMMAR_EXACT = frozenset(
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
    """JSON pointers of what an engine is not known to enforce exactly.

    Args:
        document: what `grammar_host.schema.versions` offers to the engine.
        backend: a key of `INEXACT`.
    """
    inexact = INEXACT[backend]
    return [
        f"{pointer}/{keyword}"
        for pointer, node in subschemas(document)
        for keyword in node
        if keyword in KEYWORDS and inexact(node, keyword)
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


def _outlines(node: dict[str, Any], keyword: str) -> bool:
    return False  # its adapter compiles only what it enforces


INEXACT: Mapping[str, Callable[[dict[str, Any], str], bool]] = MappingProxyType(
    {"llguidance": _llguidance, "outlines": _outlines, "xgrammar": _xgrammar}
)
"""By engine: whether it may enforce a keyword of a schema inexactly."""
