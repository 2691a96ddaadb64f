"""The schemas that an engine is offered for one schema, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grammar_host.schema.census import inexact_keywords
from grammar_host.schema.order import restore_property_order
from grammar_host.schema.reading import Schema
from grammar_host.schema.rewrite import lower_for_llguidance, modernize
from grammar_host.schema.weaken import (
    any_for_one,
    in_any_order,
    leave_out_beside_circles,
    leave_out_large_numbers,
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


def versions(schema: Schema, backend: str) -> Iterator[Version]:
    """What to offer to an engine, until it compiles one.

    Args:
        schema: what the caller asked for.
        backend: the engine's name, a key of `INEXACT`.
    """
    simple = modernize(schema.document)
    if backend != "llguidance":
        yield _version(simple, [], backend)
        return
    simple, rounded = leave_out_large_numbers(lower_for_llguidance(simple))
    yield _version(simple, rounded, backend)
    canonical = restore_property_order(schema.canonical, schema.document)
    canonical, also_rounded = leave_out_large_numbers(lower_for_llguidance(modernize(canonical)))
    yield _version(canonical, also_rounded, backend)
    for document, missing in ((canonical, also_rounded), (simple, rounded)):
        for weaken in (leave_out_unknown, in_any_order, any_for_one, leave_out_beside_circles):
            document, left_out = weaken(document)
            missing = missing + left_out
            yield _version(document, missing, backend)


def _version(document: Any, missing: list[str], backend: str) -> Version:
    return Version(document, tuple(dict.fromkeys(missing + inexact_keywords(document, backend))))
