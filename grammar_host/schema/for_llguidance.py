"""What LLGuidance 1.9.1 does not enforce, or takes for something else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from grammar_host.schema.patterns import stacks_quantifiers
from grammar_host.schema.removal import Removal
from grammar_host.schema.walk import KEYWORDS, children, escape, in_place, referred
from grammar_host.schema.weaken import Step

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


def leave_out_imprecise(
    document: Any, pointer: str, node: dict[str, Any], removal: Removal
) -> list[str]:
    """What LLGuidance would take for something else.

    That is numbers which a float of 64 bits cannot hold, some multiples (of 0.25 it would require
    both decimals), and patterns with stacked quantifiers.
    """
    missing = []
    for keyword in ("const", "enum"):
        if keyword in node and _has_rounded(node[keyword]):
            del node[keyword]
            missing.append(f"{pointer}/{keyword}")
    for keyword in sorted(BOUNDS):
        if keyword in node and _is_rounded(node, keyword):
            del node[keyword]
            missing.append(f"{pointer}/{keyword}")
    if _has_rounded(node.get("multipleOf")):
        del node["multipleOf"]
        missing.append(f"{pointer}/multipleOf")
    elif "multipleOf" in node:
        _, digits, exponent = Decimal(str(node["multipleOf"])).normalize().as_tuple()
        if len(digits) > 1 and isinstance(exponent, int) and exponent < -1:
            node["multipleOf"] = round(10**exponent, -exponent)
            missing.append(f"{pointer}/multipleOf")
    return missing + _leave_out_patterns(pointer, node, removal, stacks_quantifiers)


def leave_out_refused(is_served: Callable[[Any], bool]) -> Step:
    """Patterns (look-around, anchors in the middle) and multiples that an engine refuses.

    Args:
        is_served: whether the engine compiles a small schema.
    """

    def step(document: Any, pointer: str, node: dict[str, Any], removal: Removal) -> list[str]:
        # A pattern may cost too much together with the lengths beside it.
        lengths = {key: node[key] for key in ("minLength", "maxLength") if key in node}

        def is_refused(pattern: str) -> bool:
            return not is_served({"type": "string", "pattern": pattern, **lengths})

        missing = _leave_out_patterns(pointer, node, removal, is_refused)
        divisor = node.get("multipleOf")
        if divisor is not None and not is_served({"type": "number", "multipleOf": divisor}):
            del node["multipleOf"]
            missing.append(f"{pointer}/multipleOf")
        return missing

    return step


def leave_out_unknown(
    document: Any, pointer: str, node: dict[str, Any], removal: Removal
) -> list[str]:
    """Keywords and formats that LLGuidance does not know or cannot combine."""
    unknown = list(_unknown_keywords(node))
    for keyword in unknown:
        removal.remove(pointer, node, keyword)
    return [f"{pointer}/{keyword}" for keyword in unknown] + [
        f"{pointer}{path}" for path in _leave_out_overlaps(node)
    ]


def leave_out_beside_circles(
    document: Any, pointer: str, node: dict[str, Any], removal: Removal
) -> list[str]:
    """What LLGuidance would have to combine with a reference that leads in a circle.

    Alternatives with such a reference go where there are other rules beside them; other rules go
    where such a reference must hold.
    """
    missing = []
    for keyword in ("anyOf", "oneOf"):
        rules = _COMBINED & set(node)
        if keyword in node and len(rules) > 1 and _has_circle(document, node[keyword]):
            removal.remove(pointer, node, keyword)
            missing.append(keyword)
    branches = (node, *node.get("allOf", ()))
    circle = next((branch for branch in branches if _leads_in_circle(document, branch)), None)
    beside = sorted(_COMBINED & set(node) - {"$ref"})
    if circle is None or not beside:
        return [f"{pointer}/{keyword}" for keyword in missing]
    reference = circle["$ref"]
    for keyword in beside:
        removal.remove(pointer, node, keyword)
    node["$ref"] = reference
    return [f"{pointer}/{keyword}" for keyword in (*missing, *beside)]


def _leave_out_patterns(
    pointer: str, node: dict[str, Any], removal: Removal, is_left_out: Callable[[str], bool]
) -> list[str]:
    missing = []
    if "pattern" in node and is_left_out(node["pattern"]):
        del node["pattern"]
        missing.append(f"{pointer}/pattern")
    left_out = [name for name in node.get("patternProperties", ()) if is_left_out(name)]
    if left_out:
        ruled = removal.remove(pointer, node, "patternProperties")
        node["patternProperties"] = {k: v for k, v in ruled.items() if k not in left_out}
        # What the patterns may match is no longer told from the rest.
        if "additionalProperties" in node:
            rest = removal.remove(pointer, node, "additionalProperties")
            node["additionalProperties"] = {"anyOf": [rest, *(ruled[name] for name in left_out)]}
        missing += [f"{pointer}/patternProperties/{escape(name)}" for name in left_out]
    return missing


BOUNDS = frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"})


def _is_rounded(node: dict[str, Any], keyword: str) -> bool:
    bound = node[keyword]
    if node.get("type") == "integer" and bound == 2**63 - 1 and keyword == "maximum":
        return False  # the largest integer it knows
    if node.get("type") != "integer" and abs(bound) >= 2**53:
        return True  # it computes such ranges in floats
    return abs(bound) > 2**63 or _has_rounded(bound)


def _has_rounded(value: Any) -> bool:
    """Whether a value holds a number that LLGuidance rounds, spells differently or crashes on."""
    if isinstance(value, dict):
        return any(_has_rounded(item) for item in value.values())
    if isinstance(value, list):
        return any(_has_rounded(item) for item in value)
    if isinstance(value, float):
        return "e" in repr(value)
    return isinstance(value, int) and (abs(value) >= 2**63 or int(float(value)) != value)


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


_COMBINED = KEYWORDS - UNKNOWN_TO_LLGUIDANCE
"""What LLGuidance intersects with what it finds beside it."""


def _has_circle(document: Any, schemas: list[Any]) -> bool:
    """Whether one of the schemas, or one that it names for the same value, leads in a circle."""
    seen: set[int] = set()
    queue = list(schemas)
    while queue:
        schema = queue.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        if _leads_in_circle(document, schema):
            return True
        queue.extend(item for _, item in in_place(schema))
        queue.append(referred(document, schema))
    return False


def _leads_in_circle(document: Any, schema: Any) -> bool:
    """Whether what the schema refers to refers to itself, directly or not."""
    start = referred(document, schema) if isinstance(schema, dict) else None
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
