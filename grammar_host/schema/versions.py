"""The schemas that an engine is offered for one schema, in the order in which they are tried."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from grammar_host.schema.census import inexact_keywords
from grammar_host.schema.order import restore_property_order
from grammar_host.schema.reading import Schema
from grammar_host.schema.rewrite import lower_for_llguidance, modernize
from grammar_host.schema.weaken import (
    Step,
    any_for_one,
    in_any_order,
    leave_out_beside_circles,
    leave_out_ignored_by_xgrammar,
    leave_out_imprecise,
    leave_out_refused,
    leave_out_unknown,
    merge_patterns,
    weaken,
)

MAX_TRIALS = 200
"""Patterns and multiples of one schema that are tried by themselves."""


@dataclass(frozen=True)
class Version:
    """A schema for one engine.

    Attributes:
        document: what the engine compiles; every valid document satisfies it.
        inexact: JSON pointers of what the engine does not enforce exactly. If there is none, every
            document that satisfies it is valid.
    """

    document: Any
    inexact: tuple[str, ...]


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
        # The canonical form states every type, without which XGrammar guesses one.
        for document in (canonical, simple):
            if backend == "xgrammar":
                yield _version(*weaken(document, (leave_out_ignored_by_xgrammar,)), backend)
            else:
                yield _version(document, [], backend)
        return
    canonical = lower_for_llguidance(canonical)
    if in_order:
        yield _version(*weaken(canonical, (leave_out_imprecise,)), backend)
    for document in (canonical, simple):
        tried = None
        for steps in _weaker(compiles):
            weaker, missing = weaken(document, (leave_out_imprecise, *steps))
            if weaker != tried:
                yield _version(weaker, missing, backend)
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


def _version(document: Any, missing: list[str], backend: str) -> Version:
    return Version(document, tuple(dict.fromkeys(missing + inexact_keywords(document, backend))))
