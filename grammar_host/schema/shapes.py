"""Checks of a schema that its draft's own schema does not make everywhere, and of its extent."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from grammar_host.errors import GrammarTooComplexError, InvalidGuideError
from grammar_host.schema.walk import in_place, referred, subschemas

MAX_DECISIONS = 50_000
"""Schemas that one value may be measured against, counting each way that leads to one."""

_MAP, _LIST, _TEXT, _NUMBER, _FLAG = "object", "array", "string", "number", "boolean"
_SHAPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "$defs": (_MAP,),
        "allOf": (_LIST,),
        "anyOf": (_LIST,),
        "definitions": (_MAP,),
        "dependencies": (_MAP,),
        "dependentRequired": (_MAP,),
        "dependentSchemas": (_MAP,),
        "enum": (_LIST,),
        "exclusiveMaximum": (_NUMBER, _FLAG),
        "exclusiveMinimum": (_NUMBER, _FLAG),
        "format": (_TEXT,),
        "maxItems": (_NUMBER,),
        "maxLength": (_NUMBER,),
        "maxProperties": (_NUMBER,),
        "maximum": (_NUMBER,),
        "minItems": (_NUMBER,),
        "minLength": (_NUMBER,),
        "minProperties": (_NUMBER,),
        "minimum": (_NUMBER,),
        "multipleOf": (_NUMBER,),
        "oneOf": (_LIST,),
        "pattern": (_TEXT,),
        "patternProperties": (_MAP,),
        "prefixItems": (_LIST,),
        "properties": (_MAP,),
        "required": (_LIST,),
        "type": (_TEXT, _LIST),
        "uniqueItems": (_FLAG,),
    }
)
_KINDS: Mapping[str, type | tuple[type, ...]] = MappingProxyType(
    {_MAP: dict, _LIST: list, _TEXT: str, _NUMBER: (int, float), _FLAG: bool}
)


def check_shapes(document: Any, param: str) -> None:
    """Refuses keywords whose values have the wrong JSON type, wherever references lead.

    Args:
        document: a schema; a draft's own schema looks only where it expects schemas.
        param: of the errors.

    Raises:
        InvalidGuideError: with the keyword's JSON pointer.
    """
    for pointer, schema in subschemas(document):
        for keyword, value in schema.items():
            kinds = _SHAPES.get(keyword)
            if kinds is not None and not any(_is_kind(value, kind) for kind in kinds):
                reason = f"{keyword!r} is of type {' or '.join(kinds)}"
                raise InvalidGuideError(param, reason, pointer=f"{pointer}/{keyword}")


def _is_kind(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind != _FLAG:
        return False
    return isinstance(value, _KINDS[kind])


def check_extent(document: Any, param: str) -> None:
    """Refuses schemas that take a validator ages: combinations of combinations of combinations.

    Args:
        document: a schema with local references, none of them in a circle for the same value.
        param: of the errors.

    Raises:
        GrammarTooComplexError: more than `MAX_DECISIONS` for one value.
    """
    counts: dict[int, int] = {}
    begun: set[int] = set()  # definitions that nothing uses may lead in circles
    for pointer, start in list(subschemas(document)):
        stack = [(start, False)]
        while stack:
            schema, counted = stack.pop()
            if id(schema) in counts or (id(schema) in begun and not counted):
                continue
            begun.add(id(schema))
            below = [item for _, item in in_place(schema) if isinstance(item, dict)]
            target = referred(document, schema)
            if isinstance(target, dict):
                below.append(target)
            if counted:
                counts[id(schema)] = 1 + sum(counts.get(id(item), 1) for item in below)
            else:
                stack.append((schema, True))
                stack.extend((item, False) for item in below)
        if counts[id(start)] > MAX_DECISIONS:
            reason = f"one value is measured against more than {MAX_DECISIONS} schemas"
            raise GrammarTooComplexError(param, reason, pointer=pointer)
