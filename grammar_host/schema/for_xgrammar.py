"""What XGrammar 0.2.9 ignores, with a warning on the error stream, or misreads."""

from __future__ import annotations

import re
from typing import Any

from grammar_host.schema.for_llguidance import BOUNDS, LLGUIDANCE_FORMATS
from grammar_host.schema.removal import Removal
from grammar_host.schema.weaken import any_for_one

IGNORED_BY_XGRAMMAR = frozenset(
    {
        "contains",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "multipleOf",
        "not",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
_WHOLE_PATTERN = re.compile(
    r"\^(?:\[[^\]\\]*\]|(?!\(\?[=!<])[^|\\^$\[]|\\[dDsSwW.*+?/()\[\]{}^$-])*\$"
)


def leave_out_ignored_by_xgrammar(
    document: Any, pointer: str, node: dict[str, Any], removal: Removal
) -> list[str]:
    """What XGrammar ignores with a warning, or takes for something stronger.

    It matches the whole string against a pattern, with or without anchors, reads look-around as
    nothing, and keeps to no rule for names by pattern.
    """
    ignored = IGNORED_BY_XGRAMMAR & node.keys()
    if len(node.get("allOf", ())) > 1:
        ignored |= {"allOf"}
    if "patternProperties" in node:
        ignored |= {"patternProperties", "additionalProperties"} & node.keys()
    if "pattern" in node:
        if not _WHOLE_PATTERN.fullmatch(node["pattern"]):
            ignored |= {"pattern"}
        else:
            ignored |= {"minLength", "maxLength"} & node.keys()
    if "format" in node:
        ignored |= {"minLength", "maxLength"} & node.keys()
        if node["format"] not in LLGUIDANCE_FORMATS:  # it knows more, but not as they are
            ignored |= {"format"}
    ignored |= {keyword for keyword in BOUNDS & node.keys() if abs(node[keyword]) >= 2**53}
    # It writes objects and arrays in one way only, without blanks.
    if isinstance(node.get("const"), dict | list):
        ignored |= {"const"}
    if any(isinstance(value, dict | list) for value in node.get("enum", ())):
        ignored |= {"enum"}
    for keyword in sorted(ignored):
        removal.remove(pointer, node, keyword)
    missing = [f"{pointer}/{keyword}" for keyword in sorted(ignored)]
    if "oneOf" in node:
        missing += any_for_one(document, pointer, node, removal)
    return missing
