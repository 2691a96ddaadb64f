"""References as callers write them, made pointers from the root of the document.

Follows RFC 3986 and the identifiers of every draft: `id` (4), `$id` (6 and later), also as
fragments (`"$id": "#name"`, up to 7), `$anchor` (2019-09), `$dynamicAnchor` (2020-12).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urljoin

from grammar_host.errors import EmptyLanguageError, InvalidGuideError, UnsupportedGuideError
from grammar_host.schema.walk import (
    DEFINITIONS,
    children,
    in_place,
    leads_through_data,
    local_pointer,
    reference_to,
    referred,
    resolve,
)

_IDENTIFIERS = ("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def localize_references(document: Any, draft: int, param: str) -> None:
    """Makes every reference a `$ref` to a JSON pointer, in place, and drops the identifiers.

    Where an identifier deep in a schema makes a pointer lead to nothing (generators used to put
    one at every part), the pointer counts from the root.

    Args:
        document: a schema.
        draft: its draft, as `Schema.draft`.
        param: of the errors.

    Raises:
        InvalidGuideError: a reference to nothing.
        UnsupportedGuideError: a reference to another document, or one that depends on the way on
            which it is reached.
    """
    _Localization(document, draft, param).run()


class _Localization:
    def __init__(self, document: Any, draft: int, param: str) -> None:
        self._document = document
        self._draft = draft
        self._param = param
        self._resources: dict[str, str] = {}  # address → pointer
        self._anchors: dict[tuple[str, str], str] = {}  # address and name → pointer
        self._dynamic = Counter[str]()  # name → how many places have it
        self._found: list[tuple[str, dict[str, Any], str]] = []  # pointer, schema, base address
        self._known: set[str] = set()

    def run(self) -> None:
        self._index("", "")
        changes = []
        for pointer, schema, base in self._found:  # which grows meanwhile
            for keyword in _REFERENCES:
                if isinstance(schema.get(keyword), str):
                    target = self._target(f"{pointer}/{keyword}", schema[keyword], base)
                    self._index(target, base)
                    changes.append((f"{pointer}/{keyword}", schema, keyword, target))
        for at, schema, keyword, target in changes:
            written = schema.pop(keyword)
            name = written.partition("#")[2]
            if keyword != "$ref" and self._dynamic[name] > 1:
                reason = f"{json.dumps(written)} has several meanings"
                raise UnsupportedGuideError(self._param, reason, pointer=at)
            reference = reference_to(target)
            if "$ref" in schema:
                schema["allOf"] = [*schema.get("allOf", ()), {"$ref": reference}]
            else:
                schema["$ref"] = reference
        for _, schema, _ in self._found:
            for keyword in _IDENTIFIERS:
                if isinstance(schema.get(keyword), str | bool):
                    del schema[keyword]

    def _index(self, pointer: str, base: str) -> None:
        """Notes the identifiers at and below a pointer."""
        queue = [(pointer, resolve(self._document, pointer), base)]
        while queue:
            pointer, schema, base = queue.pop()
            if not isinstance(schema, dict) or pointer in self._known:
                continue
            self._known.add(pointer)
            base = self._identify(pointer, schema, base)
            self._found.append((pointer, schema, base))
            queue.extend((pointer + path, child, base) for path, child in children(schema))

    def _identify(self, pointer: str, schema: dict[str, Any], base: str) -> str:
        """Notes the identifiers of one schema; returns the base of the references in it."""
        identifier = schema.get("id" if self._draft == 4 else "$id")
        if not isinstance(identifier, str) or (self._draft <= 7 and "$ref" in schema):
            identifier = ""
        address, _, name = identifier.partition("#")
        if address or not pointer:
            base = urljoin(base, address)
            self._resources.setdefault(base, pointer)
        for anchor in (name, schema.get("$anchor"), schema.get("$dynamicAnchor")):
            if isinstance(anchor, str) and anchor:
                self._anchors.setdefault((base, anchor), pointer)
        if isinstance(schema.get("$dynamicAnchor"), str):
            self._dynamic[schema["$dynamicAnchor"]] += 1
        if schema.get("$recursiveAnchor") is True:
            self._dynamic[""] += 1
        return base

    def _target(self, at: str, reference: str, base: str) -> str:
        """The pointer that a reference means."""
        address, _, fragment = reference.partition("#")
        fragment = unquote(fragment)
        base = urljoin(base, address) if address else base
        resource = self._resources.get(base)
        if resource is None:
            reason = f"{json.dumps(reference)} leads to another document; include it here"
            raise UnsupportedGuideError(self._param, reason, pointer=at)
        if fragment and not fragment.startswith("/"):
            target = self._anchors.get((base, fragment))
        else:
            candidates = (resource + fragment, fragment)
            target = next((p for p in candidates if _exists(self._document, p)), None)
        if target is None:
            reason = "leads to nothing"
        elif not isinstance(resolve(self._document, target), dict | bool):
            reason = "leads to what is not a schema"
        elif leads_through_data(self._document, target):
            reason = "leads into data, not to a schema"
        else:
            return target
        raise InvalidGuideError(self._param, f"{json.dumps(reference)} {reason}", pointer=at)


def _exists(document: Any, pointer: str) -> bool:
    try:
        resolve(document, pointer)
    except KeyError:
        return False
    return True


def require_progress(document: Any, param: str) -> None:
    """Refuses schemas that ask the same value about themselves, without an end.

    Args:
        document: a schema with local references.
        param: of the errors.

    Raises:
        EmptyLanguageError: a part requires itself.
        InvalidGuideError: a part is one of its own alternatives or conditions.
    """
    reachable = _reachable(document)
    done: set[int] = set()
    for _, start in reachable.values():
        # Depth first; every step with whether it leads to something that is required.
        way = [(start, True)]
        pending = [_same_value(document, start)]
        while pending and id(start) not in done:
            required, item = next(pending[-1], (True, None))
            if item is None:
                pending.pop()
                done.add(id(way.pop()[0]))
                continue
            begun = next((i for i, (passed, _) in enumerate(way) if passed is item), None)
            if begun is not None:
                pointer, _ = reachable[id(item)]
                if required and all(step for _, step in way[begun + 1 :]):
                    reason = "requires itself, without an end"
                    raise EmptyLanguageError(param, reason, pointer=pointer)
                reason = "asks the same value whether it satisfies this very schema"
                raise InvalidGuideError(param, reason, pointer=pointer)
            if id(item) not in done:
                way.append((item, required))
                pending.append(_same_value(document, item))


def _same_value(document: Any, schema: dict[str, Any]) -> Iterator[tuple[bool, Any]]:
    """The schemas that look at the same value, and whether it must satisfy them."""
    for keyword, item in in_place(schema):
        if isinstance(item, dict):
            yield keyword == "allOf", item
    target = referred(document, schema)
    if isinstance(target, dict):
        yield True, target


def _reachable(document: Any) -> dict[int, tuple[str, dict[str, Any]]]:
    """The schemas that can take part in a decision, by id; not unused definitions."""
    found: dict[int, tuple[str, dict[str, Any]]] = {}
    queue: list[tuple[str, Any]] = [("", document)]
    while queue:
        pointer, schema = queue.pop()
        if not isinstance(schema, dict) or id(schema) in found:
            continue
        found[id(schema)] = pointer, schema
        queue.extend(
            (pointer + path, child)
            for path, child in children(schema)
            if path.split("/")[1] not in DEFINITIONS
        )
        queue.append((local_pointer(schema.get("$ref")) or "", referred(document, schema)))
    return found
