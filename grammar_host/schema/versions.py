"""The schemas that an engine is offered for one schema, in the order in which they are tried."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from grammar_host.schema.census import inexact_keywords
from grammar_host.schema.for_llguidance import (
    leave_out_beside_circles,
    leave_out_imprecise,
    leave_out_refused,
    leave_out_unknown,
)
from grammar_host.schema.for_xgrammar import leave_out_ignored_by_xgrammar
from grammar_host.schema.order import restore_property_order
from grammar_host.schema.reading import UNENFORCED, Schema
from grammar_host.schema.rewrite import lower_for_llguidance, modernize
from grammar_host.schema.weaken import Step, any_for_one, in_any_order, merge_patterns, weaken

MAX_TRIALS = 200
"""Patterns and multiples of one schema that are tried by themselves."""


_DEPENDENCIES = frozenset({"dependencies", "dependentRequired", "dependentSchemas"})
_SPELLINGS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "additionalProperties": frozenset({"propertyNames"}),
        "allOf": _DEPENDENCIES,
        "anyOf": _DEPENDENCIES,
        "dependentSchemas": _DEPENDENCIES,
        "exclusiveMaximum": frozenset({"maximum"}),
        "exclusiveMinimum": frozenset({"minimum"}),
        "items": frozenset({"additionalItems"}),
        "maximum": frozenset({"exclusiveMaximum"}),
        "minimum": frozenset({"exclusiveMinimum"}),
        "patternProperties": frozenset({"propertyNames"}),
        "prefixItems": frozenset({"items"}),
    }
)
"""From a keyword to others that rewriting may have made it of."""

_WORKED_OUT = _DEPENDENCIES | frozenset(
    {
        "contains",
        "else",
        "if",
        "maxContains",
        "maxProperties",
        "minContains",
        "minProperties",
        "not",
        "oneOf",
        "patternProperties",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
"""What the canonical form writes in other words, so that they may be meant by what is missing."""


@dataclass(frozen=True)
class Version:
    """A schema for one engine.

    Attributes:
        document: what the engine compiles; every valid document satisfies it.
        inexact: JSON pointers of what the engine does not enforce exactly. If there is none, every
            document that satisfies it is valid.
        keywords: which keywords of the caller's schema that may concern; `properties` if the engine
            lets keys be repeated.
    """

    document: Any
    inexact: tuple[str, ...]
    keywords: frozenset[str]

    def gate(self, schema: Schema) -> Any:
        """What the completion gate gets: the caller's schema, which says what to look at."""
        return {**schema.document, UNENFORCED: sorted(self.keywords)}


def versions(
    schema: Schema, backend: str, compiles: Callable[[Any], bool] = lambda schema: True
) -> Iterator[Version]:
    """What to offer to an engine, until it compiles one.

    Args:
        schema: what the caller asked for.
        backend: the engine's name, a key of `INEXACT`.
        compiles: whether the engine compiles a (small) schema.
    """
    simple = modernize(schema.document)
    if backend == "llguidance":
        simple = lower_for_llguidance(simple)
        yield _version(*weaken(simple, (leave_out_imprecise,)), backend)
    canonical, in_order = restore_property_order(schema.canonical, schema.document)
    canonical = modernize(canonical)
    if backend != "llguidance":
        xgrammar_steps = (leave_out_ignored_by_xgrammar,) if backend == "xgrammar" else ()
        # The canonical form states every type, without which XGrammar guesses one.
        yield _version(*weaken(canonical, xgrammar_steps), backend, _WORKED_OUT)
        yield _version(*weaken(simple, xgrammar_steps), backend)
        return
    canonical = lower_for_llguidance(canonical)
    if in_order:
        yield _version(*weaken(canonical, (leave_out_imprecise,)), backend, _WORKED_OUT)
    for document, others in ((canonical, _WORKED_OUT), (simple, frozenset[str]())):
        tried = None
        for steps in _weaker(compiles):
            weaker, missing = weaken(document, (leave_out_imprecise, *steps))
            if weaker != tried:
                yield _version(weaker, missing, backend, others | {"properties"})
            tried = weaker


def _weaker(compiles: Callable[[Any], bool]) -> Iterator[tuple[Step, ...]]:
    """What LLGuidance is offered less and less of."""

    served: dict[str, bool] = {}

    def is_served(schema: Any) -> bool:
        key = json.dumps(schema)
        if key not in served and len(served) < MAX_TRIALS:
            served[key] = compiles(schema)
        return served.get(key, False)

    # Where the gate has to look at objects anyway, their properties may come in any order.
    free = (leave_out_unknown, leave_out_refused(is_served), in_any_order)
    yield free
    yield *free, any_for_one
    yield *free, any_for_one, leave_out_beside_circles
    yield merge_patterns, *free, any_for_one, leave_out_beside_circles


def _version(
    document: Any, missing: list[str], backend: str, others: frozenset[str] = frozenset()
) -> Version:
    inexact = tuple(dict.fromkeys(missing + inexact_keywords(document, backend)))
    keywords = {_keyword(pointer) for pointer in inexact}
    spellings = [_SPELLINGS.get(keyword, frozenset()) for keyword in keywords]
    return Version(document, inexact, others.union(keywords, *spellings))


def _keyword(pointer: str) -> str:
    *_, above, last = pointer.split("/")
    return above if above == "patternProperties" else last
