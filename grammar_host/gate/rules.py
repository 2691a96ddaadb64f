"""Which schemas each part of a document must satisfy, and whether it does."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any
from urllib.parse import quote

import jsonschema_rs

from grammar_host.schema.reading import VALIDATION, draft_of
from grammar_host.schema.walk import escape, local_pointer, resolve

Nodes = tuple[str, ...]
"""JSON pointers of schemas."""

_SCHEMA = "https://schema.invalid/"
"""A base for references into the schema; nothing is ever fetched from it."""

_RULES_OF_STRINGS = frozenset({"format", "if", "not", "oneOf"})
"""What engines tend not to enforce of a string. The container around it covers the rest."""

MAX_VERDICTS = 256
"""Remembered verdicts per generation's rules; a mask and its token ask for the same one."""


class Rules:
    """The schema of a document, asked part by part. Thread-safe; shared by generations.

    Only schemas that a part must satisfy whatever the rest says are considered for parts: those
    reached by `properties`, `items`, `allOf` and `$ref` alone. The root schema covers the rest.
    """

    root: Nodes = ("",)

    def __init__(self, document: Any) -> None:
        """Prepares the rules.

        Args:
            document: a `Schema.document`; refers to nothing outside of it.
        """
        self._document = document
        self._draft = draft_of(document)
        unnamed = document
        if isinstance(document, dict):
            unnamed = {key: value for key, value in document.items() if key not in ("$id", "id")}
        self._registry: jsonschema_rs.Registry | None = None
        # Where identifiers inside are no addresses, only the whole document is validated.
        with contextlib.suppress(ValueError):
            self._registry = jsonschema_rs.Registry([(_SCHEMA, unnamed)])
        self._validators: dict[str, jsonschema_rs.Validator] = {
            "": jsonschema_rs.validator_for(document, **VALIDATION)
        }
        self._closures: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        self._children: dict[tuple[Nodes, str | int | None], Nodes] = {}
        self._about_strings: dict[Nodes, bool] = {}
        self._names: dict[Nodes, frozenset[bytes] | None] = {}
        self._verdicts: dict[tuple[Nodes, bytes], bool] = {}

    def child(self, nodes: Nodes, step: str | int | None) -> Nodes:
        """What the value of a property (by name) or an item (by index) must satisfy."""
        if self._registry is None:
            return ()
        key = (nodes, step)
        found = self._children.get(key)
        if found is None:
            pointers: dict[str, None] = {}
            for node in nodes:
                for pointer, schema in self._closure(node):
                    below = (
                        _item(schema, step) if isinstance(step, int) else _property(schema, step)
                    )
                    if below is not None and isinstance(resolve(schema, below), dict):
                        pointers[pointer + below] = None
            found = tuple(pointers)
            if len(self._children) < 100_000:
                self._children[key] = found
        return found

    def names(self, nodes: Nodes) -> frozenset[bytes] | None:
        """The keys that an object may have, as they are written; None if others may come too."""
        if nodes not in self._names:
            closed: frozenset[bytes] | None = None
            for node in nodes:
                for _, schema in self._closure(node):
                    if schema.get("additionalProperties") is False and not schema.get(
                        "patternProperties"
                    ):
                        listed = frozenset(map(written, schema.get("properties", {})))
                        closed = listed if closed is None else closed & listed
            self._names[nodes] = closed
        return self._names[nodes]

    def permit(self, nodes: Nodes, text: bytes) -> bool:
        """Whether a finished part satisfies its schemas; False for what is not JSON."""
        if not nodes:
            return True
        verdict = self._verdicts.get((nodes, text))
        if verdict is None:
            try:
                value = json.loads(text.decode(), parse_float=_finite)
                verdict = all(self._validator(node).is_valid(value) for node in nodes)
            except (ValueError, RecursionError):  # not JSON, or a number that no float holds
                verdict = False
            if len(self._verdicts) >= MAX_VERDICTS:
                self._verdicts = {}
            self._verdicts[nodes, text] = verdict
        return verdict

    def permit_string(self, nodes: Nodes, text: bytes) -> bool:
        """The same for a string value; asked only where an engine may be lenient with strings."""
        return not self.rules_strings(nodes) or self.permit(nodes, text)

    def rules_strings(self, nodes: Nodes) -> bool:
        """Whether the schemas say something about strings that an engine may not enforce."""
        if nodes not in self._about_strings:
            self._about_strings[nodes] = any(
                _RULES_OF_STRINGS & schema.keys()
                for node in nodes
                for _, schema in self._closure(node)
            )
        return self._about_strings[nodes]

    def violation(self, nodes: Nodes, text: bytes) -> tuple[str, str] | None:
        """The keyword that a part violates and its JSON pointer; None if there is none."""
        try:
            value = json.loads(text.decode(), parse_float=_finite)
        except (ValueError, RecursionError):
            return None
        for node in nodes:
            for error in self._validator(node).iter_errors(value):
                path = [str(token) for token in error.schema_path]  # from the root, not the node
                pointer = "".join(f"/{escape(token)}" for token in path)
                return (path[-1] if path else "schema"), pointer
        return None

    def _validator(self, pointer: str) -> jsonschema_rs.Validator:
        validator = self._validators.get(pointer)
        if validator is None:
            reference = {"$ref": f"{_SCHEMA}#{quote(pointer)}"}
            if isinstance(self._document, dict):
                reference["$schema"] = self._document["$schema"]
            validator = jsonschema_rs.validator_for(
                reference, registry=self._registry, **VALIDATION
            )
            self._validators[pointer] = validator
        return validator

    def _closure(self, pointer: str) -> list[tuple[str, dict[str, Any]]]:
        """The schema and those that it requires of the same value, with their pointers."""
        closure = self._closures.get(pointer)
        if closure is None:
            closure = []
            queue, seen = [pointer], {pointer}
            while queue:
                current = queue.pop()
                try:
                    schema = resolve(self._document, current)
                except KeyError:
                    continue
                if not isinstance(schema, dict):
                    continue
                required = []
                target = local_pointer(schema.get("$ref"))
                if target is not None:
                    required.append(target)
                if target is None or self._draft > 7:
                    closure.append((current, schema))
                    branches = schema.get("allOf")
                    count = len(branches) if isinstance(branches, list) else 0
                    required.extend(f"{current}/allOf/{index}" for index in range(count))
                queue.extend(item for item in required if item not in seen)
                seen.update(required)
            self._closures[pointer] = closure
        return closure


class RecordingRules:
    """Rules that remember the part which they refused, to explain a dead end."""

    def __init__(self, rules: Rules) -> None:
        self.refused: tuple[Nodes, bytes] | None = None
        self._rules = rules

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rules, name)

    def permit(self, nodes: Nodes, text: bytes) -> bool:
        """As `Rules.permit`."""
        permitted = self._rules.permit(nodes, text)
        if not permitted:
            self.refused = nodes, text
        return permitted

    def permit_string(self, nodes: Nodes, text: bytes) -> bool:
        """As `Rules.permit_string`."""
        return not self._rules.rules_strings(nodes) or self.permit(nodes, text)


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"no float holds {number}")
    return value


def written(name: str) -> bytes:
    """A key as it is usually written, without the quotes."""
    return json.dumps(name, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass")


def _property(schema: dict[str, Any], name: str | None) -> str | None:
    """Where the rules for a property are, relative to the schema."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return f"/properties/{escape(name or '')}"
    if not schema.get("patternProperties") and "additionalProperties" in schema:
        return "/additionalProperties"
    return None


def _item(schema: dict[str, Any], index: int) -> str | None:
    """Where the rules for an item are, relative to the schema."""
    items = schema.get("items")
    tuple_keyword = "items" if isinstance(items, list) else "prefixItems"
    rest_keyword = "additionalItems" if isinstance(items, list) else "items"
    listed = schema.get(tuple_keyword)
    if isinstance(listed, list) and index < len(listed):
        return f"/{tuple_keyword}/{index}"
    return f"/{rest_keyword}" if rest_keyword in schema else None
