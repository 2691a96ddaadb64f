"""The schemas that an engine is offered for one schema, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from grammar_host.schema.census import inexact_keywords
from grammar_host.schema.order import restore_property_order
from grammar_host.schema.reading import Schema
from grammar_host.schema.rewrite import lower_for_llguidance, simplify
from grammar_host.schema.weaken import (
    any_for_one,
    in_any_order,
    leave_out_failing,
    leave_out_unknown,
)


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


def versions(schema: Schema, backend: str, compiles: Callable[[Any], bool]) -> Iterator[Version]:
    """What to offer to an engine, until it compiles one.

    Args:
        schema: what the caller asked for.
        backend: the engine's name.
        compiles: whether the engine compiles a schema (for a search in the last resort).
    """
    simple = simplify(schema)
    if backend != "llguidance":
        yield _version(simple, [], backend)
        return
    simple = lower_for_llguidance(simple)
    yield _version(simple, [], backend)
    canonical = restore_property_order(schema.canonical, schema.document)
    canonical = lower_for_llguidance(canonical)
    yield _version(canonical, [], backend)
    for document in (canonical, simple):
        document, missing = leave_out_unknown(document)
        document, unordered = in_any_order(document)
        missing += unordered
        yield _version(document, missing, backend)
        document, approximated = any_for_one(document)
        missing += approximated
        yield _version(document, missing, backend)
    document, failing = leave_out_failing(document, compiles)
    yield _version(document, missing + failing, backend)


def _version(document: Any, missing: list[str], backend: str) -> Version:
    return Version(document, tuple(dict.fromkeys(missing + inexact_keywords(document, backend))))
