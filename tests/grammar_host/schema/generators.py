"""Random schemas over all keywords of all drafts, with documents that nearly satisfy them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import jsonschema

VALIDATORS = {
    4: jsonschema.Draft4Validator,
    6: jsonschema.Draft6Validator,
    7: jsonschema.Draft7Validator,
    19: jsonschema.Draft201909Validator,
    20: jsonschema.Draft202012Validator,
}
"""The independent oracle: the pure Python implementation."""

ADDRESSES = {draft: str(cls.META_SCHEMA["$schema"]) for draft, cls in VALIDATORS.items()}
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
PATTERNS = ("^a", "b$", "^[ab]*$", "a|b", "^.$", "c", "^[^a]+$")
NAMES = ("a", "b", "c")
ODD_NAMES = (
    "$ref",
    "properties",
    "enum",
    "not",
    "items",
    "required",
    "format",
    "x-guidance",
    "x-aside",
    "é",
    'q"',
    "back\\",
    "a/b",
    "~0",
    "%25",
    "",
)
LOOK_ALIKES: tuple[Any, ...] = (
    {"type": "string", "x-guidance": {}},
    {"enum": []},
    {"$ref": "#/nothing"},
    {"format": "date", "not": {}},
)
"""Data that looks like a schema."""

_ABOUT = {
    "object": (
        "properties",
        "properties",
        "properties",
        "required",
        "required",
        "additionalProperties",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "propertyNames",
        "unevaluatedProperties",
    ),
    "array": (
        "items",
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "unevaluatedItems",
    ),
    "string": ("minLength", "maxLength", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_ABOUT["integer"] = _ABOUT["number"]
_ABOUT_ANY = (
    "enum",
    "const",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "title",
    "default",
    "examples",
    "x-guidance",
)


class Generator:
    """Random schemas of one draft, and documents for them."""

    def __init__(self, seed: int, draft: int) -> None:
        self.random = Random(seed)
        self.draft = draft
        self.names: Sequence[str] = NAMES
        if self.random.random() < 0.3:
            self.names = (*NAMES, *self.random.sample(ODD_NAMES, 3))
        self._definitions = self.random.randint(0, 2)

    def root(self) -> dict[str, Any]:
        """A schema, without references that lead back to the same value."""
        while True:
            depth = self.random.randint(1, 3)
            schema = self.schema(depth)
            if not isinstance(schema, dict):
                continue
            schema = {"$schema": ADDRESSES[self.draft], **schema}
            if self._definitions:
                schema[self._keyword_of_definitions] = {
                    f"d{i}": self._subschema(depth) for i in range(self._definitions)
                }
            if not asks_itself(schema, self.draft):
                return schema

    def schema(self, depth: int) -> Any:
        """A subschema."""
        random = self.random
        if depth <= 0 or random.random() < 0.12:
            return {} if self.draft == 4 or random.random() < 0.65 else random.random() < 0.5
        node: dict[str, Any] = {}
        if self._definitions and random.random() < 0.15:
            place = random.randrange(self._definitions + 1)
            node["$ref"] = f"#/{self._keyword_of_definitions}/d{place}"
            if place == self._definitions:
                node["$ref"] = "#"
            if random.random() < 0.6:
                return node
        types: Sequence[str] = TYPES
        if random.random() < 0.65:
            types = random.sample(TYPES, 1 if random.random() < 0.8 else 2)
            node["type"] = types[0] if len(types) == 1 else list(types)
        options = [*_ABOUT_ANY]
        for kind in dict.fromkeys(types):
            options += _ABOUT.get(kind, ())
        for keyword in random.sample(options, random.randint(0, 4)):
            value = self._value_of(keyword, depth - 1, node)
            if value is not None:
                node[keyword] = value
        return node

    def value(self, depth: int = 2) -> Any:
        """Any JSON value."""
        random = self.random
        chance = random.random()
        if depth <= 0 or chance < 0.5:
            return random.choice(
                [None, True, False, 0, 1, 2, -1, 3, 1.5, 2.0, 0.5, 10, "", "a", "b", "ab", "é"]
            )
        if chance < 0.72:
            return [self.value(depth - 1) for _ in range(random.randint(0, 3))]
        names = random.sample(self.names, random.randint(0, 3))
        return {name: self.value(depth - 1) for name in names}

    def documents(self, schema: Any, count: int) -> Iterator[Any]:
        """Documents that satisfy the schema, or nearly so."""
        for _ in range(count):
            document = self._guess(schema, schema, 4)
            for _ in range(self.random.choice([0, 0, 1, 2])):
                document = self._change(document)
            yield document

    @property
    def _keyword_of_definitions(self) -> str:
        return "definitions" if self.draft <= 7 else "$defs"

    def _subschema(self, depth: int) -> Any:
        schema = self.schema(depth - 1)
        return schema if self.draft > 4 or isinstance(schema, dict) else {}

    def _value_of(self, keyword: str, depth: int, node: dict[str, Any]) -> Any:
        """A value for a keyword; None leaves it out."""
        random = self.random
        if keyword in ("properties", "patternProperties", "dependentSchemas"):
            keys = PATTERNS if keyword == "patternProperties" else self.names
            chosen = random.sample(keys, random.randint(1, 2))
            return {key: self._subschema(depth) for key in chosen}
        if keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
            return [self._subschema(depth) for _ in range(random.randint(1, 3))]
        if keyword in ("minProperties", "minItems", "minLength", "minContains"):
            return random.randint(0, 2)
        if keyword in ("maxProperties", "maxItems", "maxLength", "maxContains"):
            return random.randint(0, 3)
        if keyword in ("unevaluatedProperties", "unevaluatedItems"):
            # The oracle does not know what `additionalProperties` looks at in 2019-09.
            return None if self.draft == 19 else random.choice([False, False, self.schema(depth)])
        values: dict[str, Callable[[], Any]] = {
            "additionalItems": lambda: self._subschema(depth),
            "additionalProperties": lambda: random.choice([False, True, self._subschema(depth)]),
            "const": lambda: self.value(1),
            "contains": lambda: self._subschema(depth),
            "default": lambda: random.choice([*LOOK_ALIKES, 3]),
            "dependencies": lambda: self._dependencies(depth),
            "dependentRequired": lambda: {random.choice(self.names): [random.choice(self.names)]},
            "enum": self._enum,
            "examples": lambda: [random.choice(LOOK_ALIKES)],
            "exclusiveMaximum": lambda: self._exclusive("maximum", node),
            "exclusiveMinimum": lambda: self._exclusive("minimum", node),
            "if": lambda: self._condition(depth, node),
            "items": lambda: self._items(depth, node),
            "maximum": lambda: random.choice([0, 1, 2, -1, 1.5, 3]),
            "minimum": lambda: random.choice([0, 1, 2, -1, 1.5, 3]),
            "multipleOf": lambda: random.choice([1, 2, 3, 0.5]),
            "not": lambda: self._subschema(depth),
            "pattern": lambda: random.choice(PATTERNS),
            "propertyNames": lambda: self._rule_of_names(depth),
            "required": lambda: random.sample(self.names, random.randint(1, 2)),
            "title": lambda: "a title",
            "uniqueItems": lambda: random.random() < 0.8,
            "x-guidance": lambda: {"lenient": True},
        }
        return values[keyword]()

    def _dependencies(self, depth: int) -> Any:
        if self.draft >= 19:  # the oracle knows none there, the validator in use does
            return None
        name = self.random.choice(self.names)
        if self.random.random() < 0.5:
            return {name: [self.random.choice(self.names)]}
        return {name: self._subschema(depth)}

    def _enum(self) -> list[Any]:
        values: list[Any] = []
        for _ in range(self.random.randint(1, 3)):
            value = self.value(1)
            if not any(value == other for other in values):
                values.append(value)
        return values

    def _exclusive(self, inclusive: str, node: dict[str, Any]) -> Any:
        if self.draft > 4:
            return self.random.choice([0, 1, 2, -1, 1.5])
        node[inclusive] = self.random.choice([0, 1, 2])
        return self.random.random() < 0.7

    def _condition(self, depth: int, node: dict[str, Any]) -> Any:
        for keyword in ("then", "else"):
            if self.random.random() < 0.7:
                node[keyword] = self._subschema(depth)
        return self._subschema(depth)

    def _items(self, depth: int, node: dict[str, Any]) -> Any:
        if self.draft < 20 and ("additionalItems" in node or self.random.random() < 0.4):
            return [self._subschema(depth) for _ in range(self.random.randint(1, 3))]
        items = self._subschema(depth)
        return items if isinstance(items, dict) else {}  # the oracle trips over others

    def _rule_of_names(self, depth: int) -> Any:
        choice = self.random.random()
        if choice < 0.4:
            return {"pattern": self.random.choice(PATTERNS)}
        if choice < 0.7:
            return {"enum": self.random.sample(self.names, 2)}
        return self._subschema(depth)

    def _guess(self, schema: Any, root: Any, depth: int) -> Any:
        """A document that may well satisfy a schema."""
        random = self.random
        if not isinstance(schema, dict) or depth <= 0:
            return self.value(1)
        if "const" in schema and random.random() < 0.9:
            return schema["const"]
        if "enum" in schema and random.random() < 0.9:
            return random.choice(schema["enum"])
        if "$ref" in schema and random.random() < 0.8:
            return self._guess(target_of(root, schema["$ref"]), root, depth - 1)
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword in schema and random.random() < 0.4:
                return self._guess(random.choice(schema[keyword]), root, depth - 1)
        kind = schema.get("type", random.choice(_kinds_of(schema)))
        kind = random.choice(kind) if isinstance(kind, list) else kind
        if kind == "object":
            return self._guess_object(schema, root, depth - 1)
        if kind == "array":
            return self._guess_array(schema, root, depth - 1)
        choices: dict[str, list[Any]] = {
            "null": [None],
            "boolean": [True, False],
            "integer": [0, 1, 2, 3, -1, 6],
            "number": [0, 1, 1.5, 0.5, 2, 3],
            "string": ["", "a", "b", "ab", "c", "aab", "é"],
        }
        return random.choice(choices[kind])

    def _guess_object(self, schema: dict[str, Any], root: Any, depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        names = [name for name in properties if self.random.random() < 0.6]
        names += [name for name in schema.get("required", ()) if name not in names]
        if self.random.random() < 0.3:
            names.append(self.random.choice(self.names))
        return {name: self._guess(properties.get(name, {}), root, depth) for name in names}

    def _guess_array(self, schema: dict[str, Any], root: Any, depth: int) -> list[Any]:
        items = schema.get("items", {})
        first = items if isinstance(items, list) else schema.get("prefixItems", [])
        rest = schema.get("additionalItems", {}) if isinstance(items, list) else items
        more = [rest] * self.random.randint(0, 2)
        return [self._guess(item, root, depth) for item in [*first, *more]]

    def _change(self, value: Any) -> Any:
        random = self.random
        if random.random() < 0.3 or not isinstance(value, list | dict):
            return self.value(2)
        places = range(len(value)) if isinstance(value, list) else list(value)
        if places and random.random() < 0.6:
            place = random.choice(places)
            changed = value.copy()
            if random.random() < 0.5:
                del changed[place]
            else:
                changed[place] = self._change(value[place])
            return changed
        if isinstance(value, list):
            return [*value, self.value(1)]
        return {**value, random.choice(self.names): self.value(1)}


def _kinds_of(schema: dict[str, Any]) -> list[str]:
    kinds = [kind for kind, keywords in _ABOUT.items() if set(keywords) & schema.keys()]
    return kinds or list(TYPES)


def target_of(root: Any, reference: str) -> Any:
    """What `#/$defs/name` leads to."""
    target = root
    for token in reference.split("/")[1:]:
        target = target[token]
    return target


def asks_itself(root: Any, draft: int) -> bool:
    """Whether some schema of the document is measured against the very value it measures."""
    active: set[int] = set()
    done: set[int] = set()

    def visit(schema: Any) -> bool:
        if not isinstance(schema, dict) or id(schema) in done:
            return False
        if id(schema) in active:
            return True
        active.add(id(schema))
        below = []
        if isinstance(schema.get("$ref"), str):
            below.append(target_of(root, schema["$ref"]))
        if draft > 7 or "$ref" not in schema:
            for keyword in ("allOf", "anyOf", "oneOf"):
                below += schema.get(keyword, ())
            below += [schema.get(keyword) for keyword in ("not", "if", "then", "else")]
            for keyword in ("dependencies", "dependentSchemas"):
                below += schema.get(keyword, {}).values()
        found = any(visit(item) for item in below)
        active.discard(id(schema))
        done.add(id(schema))
        return found

    return any(visit(schema) for schema in _objects(root))


def _objects(value: Any) -> Iterator[Any]:
    """Every object that may be a schema; data is none."""
    if isinstance(value, dict):
        yield value
        for key, item in value.items():
            if key not in ("const", "enum", "default", "examples", "x-guidance"):
                yield from _objects(item)
    elif isinstance(value, list):
        for item in value:
            yield from _objects(item)


def has_whole_float(value: Any) -> bool:
    """Whether a document holds a number like 2.0, which engines may not write."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(has_whole_float, value))
    return isinstance(value, float) and value.is_integer()


def orders(value: Any) -> Iterator[Any]:
    """The same document with its properties in every order."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*map(orders, value)))
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            for values in itertools.product(*(orders(value[name]) for name in names)):
                yield dict(zip(names, values, strict=True))
    else:
        yield value
