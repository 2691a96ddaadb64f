"""Which keywords of a schema an engine enforces exactly, so that no gate is needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from grammar_host.schema.for_llguidance import UNKNOWN_TO_LLGUIDANCE
from grammar_host.schema.walk import KEYWORDS, subschemas

_EXACT_FORMATS = frozenset({"duration", "ipv4", "ipv6", "uri", "uuid"})
"""The others have rules that regular expressions miss: leap years, lengths of labels, ..."""

_XGRAMMAR_EXACT = {
    "array": frozenset({"items", "maxItems", "minItems", "prefixItems"}),
    "boolean": frozenset(),
    "integer": frozenset(),
    "null": frozenset(),
    "number": frozenset(),
    "object": frozenset({"additionalProperties", "properties", "required"}),
    "string": frozenset(),  # beside a length it lets control characters pass
}
"""What XGrammar enforces of a schema with one `type`. Without a type, or beside other rules, most
keywords mean something else to it."""


def inexact_keywords(document: Any, backend: str) -> list[str]:
    """JSON pointers of what an engine is not known to enforce exactly.

    Args:
        document: what `grammar_host.schema.versions` offers to the engine.
        backend: a key of `INEXACT`.
    """
    nodes = list(subschemas(document))
    inexact = INEXACT[backend]([node for _, node in nodes])
    return [
        f"{pointer}/{keyword}"
        for pointer, node in nodes
        for keyword in node
        if keyword in KEYWORDS and inexact(node, keyword)
    ]


IsInexact = Callable[[dict[str, Any], str], bool]


def _llguidance(nodes: list[dict[str, Any]]) -> IsInexact:
    # LLGuidance refuses what it cannot enforce; what is listed here it only approximates.
    bounds = {
        keyword: [node[keyword] for node in nodes if keyword in node] for keyword in _OPPOSITE
    }

    def is_inexact(node: dict[str, Any], keyword: str) -> bool:
        if keyword == "format":
            return node["format"] not in _EXACT_FORMATS
        if keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            # It allows the bound itself if the other one is close. Schemas may be combined, so
            # the other one can be anywhere.
            return any(
                abs(other - node[keyword]) < 1
                for opposite in _OPPOSITE[keyword]
                for other in bounds[opposite]
            )
        return keyword in UNKNOWN_TO_LLGUIDANCE

    return is_inexact


_OPPOSITE = {
    "minimum": ("maximum", "exclusiveMaximum"),
    "maximum": ("minimum", "exclusiveMinimum"),
    "exclusiveMinimum": ("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": ("minimum", "exclusiveMinimum"),
}


def _xgrammar(nodes: list[dict[str, Any]]) -> IsInexact:
    return _inexact_in_xgrammar


def _inexact_in_xgrammar(node: dict[str, Any], keyword: str) -> bool:
    keywords = KEYWORDS & set(node)
    if keyword in ("$ref", "anyOf", "const", "enum"):
        return len(keywords) > 1
    kind = node.get("type")
    if keyword == "type":
        return isinstance(kind, list) and len(keywords) > 1
    if keyword == "required" and not set(node["required"]) <= set(node.get("properties", ())):
        return True
    if keyword == "properties" and "\\" in json.dumps("".join(node["properties"])):
        # It lets further properties repeat such a name.
        return node.get("additionalProperties") is not False
    return not isinstance(kind, str) or keyword not in _XGRAMMAR_EXACT[kind]


def _outlines(nodes: list[dict[str, Any]]) -> IsInexact:
    return lambda node, keyword: False  # its adapter compiles only what it enforces


INEXACT: Mapping[str, Callable[[list[dict[str, Any]]], IsInexact]] = MappingProxyType(
    {"llguidance": _llguidance, "outlines": _outlines, "xgrammar": _xgrammar}
)
"""By engine: whether it may enforce a keyword inexactly, given all schemas of a document."""
