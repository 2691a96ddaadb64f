"""Which schemas each part of a document must satisfy, and whether it does."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import jsonschema_rs

from grammar_host.schema.reading import UNENFORCED, VALIDATION
from grammar_host.schema.removal import caller_pointer
from grammar_host.schema.walk import DEFINITIONS, children, escape, local_pointer, referred, resolve

Nodes = tuple[str, ...]
"""JSON pointers of schemas that one value must satisfy."""

_BASE = "https://schema.invalid/"
"""A base for references into the schema; nothing is ever fetched from it."""

_ELSEWHERE = ("properties", "items", "prefixItems", "additionalItems", "additionalProperties")
"""Keywords whose schemas are asked by themselves, about the parts that they rule."""

MAX_REMEMBERED = 10_000
"""Answers of each kind that are remembered; property names may be anything."""


class Rules:
    """The schema of a document, asked part by part. Thread-safe; shared by generations.

    Only schemas that a part must satisfy whatever the rest says are considered for parts: those
    reached by `properties`, `items`, `allOf` and `$ref` alone. The root schema covers the rest.

    Attributes:
        limit_keys: whether keys that an object must not have may be begun.
    """

    root: Nodes = ("",)

    def __init__(self, document: Any) -> None:
        """Prepares the rules.

        Args:
            document: a `Schema.document`, or what `Version.gate` makes of it: then parts are not
                looked at if none of the keywords that the engine may not enforce is about them.
        """
        self._document = document
        unenforced = document.get(UNENFORCED)
        self._keywords = None if unenforced is None else frozenset(unenforced)
        self.limit_keys = self._keywords is None or "properties" in self._keywords
        self._registry = jsonschema_rs.Registry([(_BASE, document)])
        self._validators: dict[str, jsonschema_rs.Validator] = {}
        self._closures: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {}
        self._children: dict[tuple[Nodes, str | int], Nodes] = {}
        self._name: dict[Nodes, Nodes] = {}
        self._keys: dict[Nodes, frozenset[bytes] | None] = {}
        self._matters: dict[Nodes, bool] = {}
        self._unique: dict[Nodes, bool] = {}
        # Not in the middle of the first generation.
        self._validator("")
        self.matters(self.root)

    def child(self, nodes: Nodes, step: str | int) -> Nodes:
        """What the value of a property (by name) or an item (by index) must satisfy."""
        found = self._children.get((nodes, step))
        if found is None:
            find = _item if isinstance(step, int) else _property
            found = self._find(nodes, lambda schema: find(schema, step))  # type: ignore[arg-type]
            _remember(self._children, (nodes, step), found)
        return found

    def name(self, nodes: Nodes) -> Nodes:
        """What the names of an object's properties must satisfy."""
        found = self._name.get(nodes)
        if found is None:
            found = self._find(
                nodes, lambda schema: "/propertyNames" if "propertyNames" in schema else None
            )
            _remember(self._name, nodes, found)
        return found

    def keys(self, nodes: Nodes) -> frozenset[bytes] | None:
        """The keys that an object may have, as they are written; None if others may come, too."""
        if not self.limit_keys:
            return None
        if nodes in self._keys:
            return self._keys[nodes]
        keys: frozenset[bytes] | None = None
        for node in nodes:
            for _, schema in self._closure(node):
                if _is_closed(schema):
                    listed = frozenset(map(_written, schema.get("properties", ())))
                    keys = listed if keys is None else keys & listed
        _remember(self._keys, nodes, keys)
        return keys

    def allows_key(self, nodes: Nodes, key: str) -> bool:
        """Whether an object may have a key, as far as that can be told from the key."""
        keys = self.keys(nodes)
        return keys is None or _written(key) in keys

    def matters(self, nodes: Nodes) -> bool:
        """Whether something is said about the value that the engine may not enforce."""
        matters = self._matters.get(nodes)
        if matters is None:
            said = (self._said(node) for node in nodes)
            matters = bool(nodes) and (
                self._keywords is None or any(self._keywords & words for words in said)
            )
            _remember(self._matters, nodes, matters)
        return matters

    def unique(self, nodes: Nodes) -> bool:
        """Whether the items of an array must differ, and the engine may not see to it."""
        unique = self._unique.get(nodes)
        if unique is None:
            enforced = self._keywords is not None and "uniqueItems" not in self._keywords
            unique = not enforced and any(
                schema.get("uniqueItems") is True
                for node in nodes
                for _, schema in self._closure(node)
            )
            _remember(self._unique, nodes, unique)
        return unique

    def closed_at(self, nodes: Nodes) -> str | None:
        """The pointer of the `additionalProperties: false` that `keys` comes from."""
        for node in nodes:
            for pointer, schema in self._closure(node):
                if _is_closed(schema):
                    return caller_pointer(f"{pointer}/additionalProperties")
        return None

    def permit(self, nodes: Nodes, text: bytes) -> bool:
        """Whether a finished part satisfies its schemas; False for what is not JSON."""
        try:
            value = _parse(text)
            return all(self._validator(node).is_valid(value) for node in nodes)
        except (ValueError, RecursionError):
            return False

    def violation(self, nodes: Nodes, text: bytes) -> tuple[str, str] | None:
        """The keyword that a part violates, and its JSON pointer in the caller's schema."""
        try:
            value = _parse(text)
            for node in nodes:
                for error in self._validator(node).iter_errors(value):
                    path = [str(token) for token in error.schema_path]
                    pointer = "".join(f"/{escape(token)}" for token in path)
                    return (path[-1] if path else "false"), caller_pointer(pointer)
        except (ValueError, RecursionError):
            pass
        return None

    def _find(self, nodes: Nodes, find: Any) -> Nodes:
        """The subschemas at the paths that `find` names for each of the schemas."""
        pointers: dict[str, None] = {}
        for node in nodes:
            for pointer, schema in self._closure(node):
                path = find(schema)
                if path is not None and isinstance(resolve(schema, path), dict):
                    pointers[pointer + path] = None
        return tuple(pointers)

    def _validator(self, pointer: str) -> jsonschema_rs.Validator:
        validator = self._validators.get(pointer)
        if validator is None:
            reference = {
                "$schema": self._document["$schema"],
                "$ref": f"{_BASE}#{quote(pointer)}",
            }
            validator = jsonschema_rs.validator_for(
                reference, registry=self._registry, **VALIDATION
            )
            self._validators[pointer] = validator
        return validator

    def _closure(self, pointer: str) -> tuple[tuple[str, dict[str, Any]], ...]:
        """The schema and those that it requires of the same value, with their pointers."""
        closure = self._closures.get(pointer)
        if closure is None:
            closure = self._closures[pointer] = tuple(self._required(pointer))
        return closure

    def _required(self, pointer: str) -> Iterator[tuple[str, dict[str, Any]]]:
        queue, seen = [pointer], {pointer}
        while queue:
            current = queue.pop()
            schema = resolve(self._document, current)
            if not isinstance(schema, dict):
                continue
            yield current, schema
            required = [f"{current}/allOf/{i}" for i in range(len(schema.get("allOf", ())))]
            target = local_pointer(schema.get("$ref"))
            if target is not None:
                required.append(target)
            queue.extend(item for item in required if item not in seen)
            seen.update(required)

    def _said(self, pointer: str) -> set[str]:
        """The keywords of a schema, but those that are asked about parts by themselves."""
        said: set[str] = set()
        queue: list[Any] = []
        for _, schema in self._closure(pointer):
            said.update(schema)
            for path, child in children(schema):
                keyword = path.split("/")[1]
                asked = keyword in _ELSEWHERE and "patternProperties" not in schema
                if not asked and keyword not in ("allOf", *DEFINITIONS):
                    queue.append(child)
        seen: dict[int, Any] = {}
        while queue:
            schema = queue.pop()
            if isinstance(schema, dict) and id(schema) not in seen:
                seen[id(schema)] = schema
                said.update(schema)
                queue.extend(
                    child
                    for path, child in children(schema)
                    if path.split("/")[1] not in DEFINITIONS
                )
                queue.append(referred(self._document, schema))
        return said


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
    if len(memory) < MAX_REMEMBERED:
        memory[key] = value


def _is_closed(schema: dict[str, Any]) -> bool:
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def _written(name: str) -> bytes:
    return json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _parse(text: bytes) -> Any:
    return json.loads(text, parse_float=_finite)


def _finite(text: str) -> float:
    """A number as readers will see it, which must not be infinite."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(text)
    return value


def _property(schema: dict[str, Any], name: str) -> str | None:
    """Where the rules for a property are, relative to the schema."""
    if name in schema.get("properties", ()):
        return f"/properties/{escape(name)}"
    if not schema.get("patternProperties") and "additionalProperties" in schema:
        return "/additionalProperties"
    return None


def _item(schema: dict[str, Any], index: int) -> str | None:
    """Where the rules for an item are, relative to the schema."""
    items = schema.get("items")
    tuple_keyword = "items" if isinstance(items, list) else "prefixItems"
    rest_keyword = "additionalItems" if isinstance(items, list) else "items"
    if index < len(schema.get(tuple_keyword, ())):
        return f"/{tuple_keyword}/{index}"
    return f"/{rest_keyword}" if rest_keyword in schema else None
