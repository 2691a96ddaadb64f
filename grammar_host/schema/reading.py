"""From a caller's schema to one that is known to be well formed, local and satisfiable."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass
from typing import Any

import jsonschema_rs

from grammar_host.errors import (
    EmptyLanguageError,
    InvalidGuideError,
    UnsupportedGuideError,
    clean_reason,
)
from grammar_host.schema.strict import close_objects
from grammar_host.schema.walk import escape, local_pointer, referred, resolve, subschemas

PARAM = "schema"
"""The field that errors about schemas name."""

MAX_BACKTRACKS = 100_000
"""Steps that one regular expression with look-around may take on one string."""

_DRAFTS = (
    (jsonschema_rs.Draft202012, "https://json-schema.org/draft/2020-12/schema"),
    (jsonschema_rs.Draft7, "http://json-schema.org/draft-07/schema#"),
    (jsonschema_rs.Draft4, "http://json-schema.org/draft-04/schema#"),
)
"""How a schema that does not say its draft is read: as the newest draft that it is valid in."""

_DRAFT_NUMBERS = {
    jsonschema_rs.Draft4Validator: jsonschema_rs.Draft4,
    jsonschema_rs.Draft6Validator: jsonschema_rs.Draft6,
    jsonschema_rs.Draft7Validator: jsonschema_rs.Draft7,
    jsonschema_rs.Draft201909Validator: jsonschema_rs.Draft201909,
    jsonschema_rs.Draft202012Validator: jsonschema_rs.Draft202012,
}

VALIDATION: dict[str, Any] = {
    "validate_formats": True,
    "offline": True,  # a caller's schema must not make the host fetch addresses
    "pattern_options": jsonschema_rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKS),
}
"""How documents are validated: formats that the draft defines are assertions."""


@dataclass(frozen=True)
class Schema:
    """A schema that has been read: well formed, without outside references, closed if asked.

    Attributes:
        document: the schema, with a `$schema` that names its draft. Not to be changed.
        draft: the draft as jsonschema_rs numbers them: 4, 6, 7, 19, 20.
        canonical: an equivalent schema in jsonschema_rs' normal form, in which most negations and
            combinations are worked out. Its properties are in alphabetical order.
        notes: what was decided while reading, in words.
    """

    document: Any
    draft: int
    canonical: Any
    notes: tuple[str, ...] = ()


def validator_for(document: Any) -> jsonschema_rs.Validator:
    """A validator for a `Schema.document`; formats that its draft knows are checked."""
    return jsonschema_rs.validator_for(document, **VALIDATION)


def read_schema(document: Any, *, strict: bool = False) -> Schema:
    """Reads a schema.

    Args:
        document: parsed JSON; not changed.
        strict: close objects and tuples to what the schema does not mention.

    Raises:
        InvalidGuideError: not a schema of any draft, or a reference to nothing.
        UnsupportedGuideError: a reference to another document.
        EmptyLanguageError: no document satisfies it.
    """
    schema, notes = _with_draft(copy.deepcopy(document))
    _check_references(schema)
    if strict:
        close_objects(schema)
    try:
        validator_for(schema)
        canonical = jsonschema_rs.canonicalize(schema, **VALIDATION)
    except jsonschema_rs.ValidationError as error:
        raise _keyword_error(error) from None
    except (jsonschema_rs.ReferencingError, ValueError) as error:
        raise InvalidGuideError(PARAM, clean_reason(str(error))) from None
    if canonical.satisfiability() == jsonschema_rs.canonical.Satisfiability.NO:
        raise _empty(schema)
    return Schema(schema, canonical.draft, canonical.to_json_schema(), tuple(notes))


def draft_of(document: Any) -> int:
    """The number of the draft that a `Schema.document` is written in."""
    return _DRAFT_NUMBERS[jsonschema_rs.validator_cls_for(document)]


@functools.cache
def knows_format(draft: int, name: str) -> bool:
    """Whether a draft defines a format, so that it is more than an annotation."""
    nonsense = "\x01 no format allows this \x7f"
    return not jsonschema_rs.is_valid(
        {"format": name}, nonsense, draft=draft, validate_formats=True
    )


def _with_draft(schema: Any) -> tuple[Any, list[str]]:
    """The schema with a `$schema` that it is valid under, and what was assumed."""
    if not isinstance(schema, dict):
        return {"$schema": _DRAFTS[0][1], **({} if schema else {"not": {}})}, []
    declared = schema.get("$schema")
    if isinstance(declared, str):
        try:
            jsonschema_rs.validator_cls_for(schema)
            jsonschema_rs.meta.validate(schema)
        except jsonschema_rs.ValidationError as error:
            raise _keyword_error(error) from None
        except (jsonschema_rs.ReferencingError, ValueError) as error:
            pointer, reason = "/$schema", clean_reason(str(error))
            raise UnsupportedGuideError(PARAM, reason, pointer=pointer) from None
        return schema, []
    first: jsonschema_rs.ValidationError | None = None
    for _, address in _DRAFTS:
        schema["$schema"] = address
        try:
            jsonschema_rs.meta.validate(schema)
        except jsonschema_rs.ValidationError as error:
            first = first or error
        else:
            return schema, [] if first is None else [f"read as {address}, the draft it is valid in"]
    assert first is not None
    raise _keyword_error(first)


def _keyword_error(error: jsonschema_rs.ValidationError) -> InvalidGuideError:
    pointer = "".join(f"/{escape(token)}" for token in error.instance_path)
    return InvalidGuideError(PARAM, clean_reason(error.message), pointer=pointer)


def _check_references(document: Any) -> None:
    """Refuses references that lead outside, to nothing, or back to where they stand."""
    anchored = _anchors(document)
    for pointer, schema in subschemas(document):
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            reference = schema.get(keyword)
            if not isinstance(reference, str):
                continue
            target = local_pointer(reference)
            if target is None:
                if reference.partition("#")[0] and not anchored:
                    raise UnsupportedGuideError(
                        PARAM,
                        f"{json.dumps(reference)} leads to another document; include it here",
                        pointer=f"{pointer}/{keyword}",
                    )
                continue
            try:
                resolve(document, target)
            except KeyError:
                if not anchored:
                    reason = f"{json.dumps(reference)} leads to nothing"
                    raise InvalidGuideError(PARAM, reason, pointer=f"{pointer}/{keyword}") from None
        if _requires_itself(document, schema):
            raise EmptyLanguageError(PARAM, "requires itself, without an end", pointer=pointer)


def _anchors(document: Any) -> bool:
    """Whether references may be relative to something other than the root."""
    return any(
        isinstance(schema.get(keyword), str) and (pointer or keyword == "$anchor")
        for pointer, schema in subschemas(document)
        for keyword in ("$id", "id", "$anchor", "$dynamicAnchor")
    )


def _requires_itself(document: Any, schema: dict[str, Any]) -> bool:
    """Whether following references and `allOf` alone leads back to the schema."""
    seen: set[int] = set()
    queue = [schema]
    while queue:
        current = queue.pop()
        required = list(current.get("allOf", ()))
        required.append(referred(document, current))
        for item in required:
            if item is schema:
                return True
            if isinstance(item, dict) and id(item) not in seen:
                seen.add(id(item))
                queue.append(item)
    return False


def _empty(schema: Any) -> EmptyLanguageError:
    """The error for a schema that nothing satisfies, with the innermost cause."""
    causes = jsonschema_rs.canonical.find_unsatisfiable(schema, offline=True)
    pointer = max(causes, key=len, default=None)
    return EmptyLanguageError(PARAM, "no document satisfies the schema", pointer=pointer)
