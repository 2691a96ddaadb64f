"""From a caller's schema to one that is known to be well formed, local and satisfiable."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import jsonschema_rs
from jsonschema_rs.canonical.schema import clone

from grammar_host.errors import (
    EmptyLanguageError,
    InvalidGuideError,
    UnsupportedGuideError,
    clean_reason,
)
from grammar_host.schema.references import localize_references, require_progress
from grammar_host.schema.removal import ASIDE, Removal, caller_pointer
from grammar_host.schema.shapes import check_extent, check_shapes
from grammar_host.schema.strict import close_objects
from grammar_host.schema.walk import (
    DEFINITIONS,
    escape,
    referred,
    resolve,
    subschemas,
    unescape,
)

PARAM = "schema"
"""The field that errors about schemas name."""

MAX_BACKTRACKS = 100_000
"""Steps that one regular expression with look-around may take on one string."""

MAX_CAUSES = 20
"""Parts that are tried as the cause why nothing satisfies a schema."""

_ADDRESSES = {
    20: "https://json-schema.org/draft/2020-12/schema",
    19: "https://json-schema.org/draft/2019-09/schema",
    7: "http://json-schema.org/draft-07/schema#",
    6: "http://json-schema.org/draft-06/schema#",
    4: "http://json-schema.org/draft-04/schema#",
}
"""A schema that does not say its draft is read as the newest one."""

_SPELT_DIFFERENTLY = {
    7: (["items"],),
    4: (["items"], ["exclusiveMinimum"], ["exclusiveMaximum"]),
}
"""Unless a keyword has a form that only an older draft gives it."""

_DRAFTS = {
    jsonschema_rs.Draft4Validator: 4,
    jsonschema_rs.Draft6Validator: 6,
    jsonschema_rs.Draft7Validator: 7,
    jsonschema_rs.Draft201909Validator: 19,
    jsonschema_rs.Draft202012Validator: 20,
}

_SINCE = {
    "const": 6,
    "contains": 6,
    "propertyNames": 6,
    "if": 7,
    "then": 7,
    "else": 7,
    "dependentRequired": 19,
    "dependentSchemas": 19,
    "minContains": 19,
    "maxContains": 19,
    "unevaluatedItems": 19,
    "unevaluatedProperties": 19,
    "prefixItems": 20,
}
"""The draft in which a keyword began to mean something."""

_ANNOTATIONS = frozenset({"contentEncoding", "contentMediaType", "contentSchema"})
"""Drafts 6 and 7 leave it to the implementation whether these are more; later they are not."""

UNENFORCED = "x-unenforced"
"""In a schema for the completion gate: the keywords that an engine may not enforce."""

_ENGINE_OPTIONS = "x-guidance"
"""LLGuidance would read options from it, among them to enforce less."""

_RESERVED = frozenset({_ENGINE_OPTIONS, ASIDE, UNENFORCED})

VALIDATION: dict[str, Any] = {
    "validate_formats": True,
    "offline": True,  # a caller's schema must not make the host fetch addresses
    "pattern_options": jsonschema_rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKS),
}
"""How documents are validated: formats that the draft defines are assertions."""


@dataclass(frozen=True)
class Schema:
    """A schema that has been read: well formed, local, closed if asked.

    Attributes:
        document: the schema with a `$schema` that names its draft, every reference a `$ref` to a
            JSON pointer, and without keywords that mean nothing in its draft. What is left is
            where it was, but for what references lead to in keywords that mean nothing
            (`grammar_host.schema.removal`). Not to be changed.
        draft: 4, 6, 7, 19 or 20 (2019-09, 2020-12).
        canonical: an equivalent schema in jsonschema_rs' normal form, in which most negations and
            combinations are worked out. Its properties are in alphabetical order. The document where
            that form needs a number that is no float.
        notes: what was decided while reading, in words.
    """

    document: Any
    draft: int
    canonical: Any
    notes: tuple[str, ...] = ()

    def ends_itself(self) -> bool:
        """Whether every document is an object, an array or a string, whose last byte says so."""
        return _ends_itself(self.document, self.document)


def _ends_itself(document: Any, schema: Any) -> bool:
    # References in circles for the same value have been refused, so this comes to an end.
    if not isinstance(schema, dict):
        return False
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return set(types) <= {"array", "object", "string"}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [None])
    if all(isinstance(value, dict | list | str) for value in values):
        return True
    if any(_ends_itself(document, item) for item in schema.get("allOf", ())):
        return True
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and all(_ends_itself(document, item) for item in schema[keyword]):
            return True
    return _ends_itself(document, referred(document, schema))


def validator_for(document: Any) -> jsonschema_rs.Validator:
    """A validator for a `Schema.document`; formats that its draft knows are checked."""
    return jsonschema_rs.validator_for(document, **VALIDATION)


def read_schema(document: Any, *, strict: bool = False) -> Schema:
    """Reads a schema.

    Args:
        document: parsed JSON; not changed.
        strict: close objects and tuples to what the schema does not mention.

    Raises:
        InvalidGuideError: not a schema of any draft, a reference to nothing, or a schema that
            depends on itself for the same value.
        UnsupportedGuideError: an unknown draft, or a reference to another document.
        EmptyLanguageError: no document satisfies it.
        GrammarTooComplexError: its combinations would take a validator ages.
    """
    schema, notes = _with_draft(clone(document))
    draft = draft_of(schema)
    localize_references(schema, draft, PARAM)
    check_shapes(schema, PARAM)
    _remove_meaningless(schema, draft)
    require_progress(schema, PARAM)
    check_extent(schema, PARAM)
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
        reason = "no document satisfies the schema"
        raise EmptyLanguageError(PARAM, reason, pointer=_cause_of_emptiness(schema))
    return Schema(schema, draft, _as_json(canonical.to_json_schema(), schema), tuple(notes))


def _as_json(canonical: Any, schema: Any) -> Any:
    """The canonical form; the schema itself where a bound was worked out that is no float."""
    try:
        json.dumps(canonical)
    except TypeError:  # of a Decimal
        return schema
    return canonical


def _with_draft(schema: Any) -> tuple[Any, list[str]]:
    """The schema with a `$schema` that it is valid under, and what was assumed."""
    if not isinstance(schema, dict):
        return {"$schema": _ADDRESSES[20], **({} if schema else {"not": {}})}, []
    if "$schema" in schema:
        schema["$schema"] = _known_address(schema["$schema"])
        error = _malformed(schema)
        if error is not None:
            raise _keyword_error(error)
        return schema, []
    schema["$schema"] = _ADDRESSES[20]
    error = first = _malformed(schema)
    for draft, keywords in _SPELT_DIFFERENTLY.items():
        if error is not None and first is not None and first.instance_path[-1:] in keywords:
            schema["$schema"] = _ADDRESSES[draft]
            error = _malformed(schema)
    if error is not None and first is not None:
        raise _keyword_error(first)
    return schema, [] if first is None else [f"read as {schema['$schema']}, as it is written"]


def _known_address(address: Any) -> str:
    """The one spelling of a draft's address; others would be fetched, or read as the newest."""
    if not isinstance(address, str):
        raise InvalidGuideError(PARAM, "the address of a draft is a string", pointer="/$schema")
    bare = address.removesuffix("#").removeprefix("https://").removeprefix("http://")
    for known in _ADDRESSES.values():
        if bare == known.removesuffix("#").partition("://")[2]:
            return known
    raise UnsupportedGuideError(
        PARAM, "served are drafts 4, 6, 7, 2019-09 and 2020-12", pointer="/$schema"
    )


def _malformed(schema: Any) -> jsonschema_rs.ValidationError | None:
    try:
        jsonschema_rs.meta.validate(schema)
    except jsonschema_rs.ValidationError as error:
        return error
    return None


def draft_of(document: Any) -> int:
    return _DRAFTS[jsonschema_rs.validator_cls_for(document)]


def _keyword_error(error: jsonschema_rs.ValidationError) -> InvalidGuideError:
    pointer = "".join(f"/{escape(token)}" for token in error.instance_path)
    return InvalidGuideError(PARAM, clean_reason(error.message), pointer=pointer)


def _remove_meaningless(document: Any, draft: int) -> None:
    """Removes what engines could take for more than it is."""
    removal = Removal(document)
    for pointer, schema in list(subschemas(document)):
        for keyword in [keyword for keyword in schema if _means_nothing(schema, keyword, draft)]:
            removal.remove(pointer, schema, keyword)
        if pointer and "$schema" in schema:
            del schema["$schema"]
    removal.finish()


def _means_nothing(schema: dict[str, Any], keyword: str, draft: int) -> bool:
    if keyword in _RESERVED or keyword in _ANNOTATIONS or draft < _SINCE.get(keyword, 0):
        return True
    if draft <= 7 and "$ref" in schema:
        return keyword not in ("$ref", "$schema", *DEFINITIONS)
    if keyword == "additionalItems":
        return not isinstance(schema.get("items"), list)
    if keyword in ("minContains", "maxContains"):
        return "contains" not in schema
    if keyword in ("then", "else"):
        return "if" not in schema
    return keyword == "format" and not _knows_format(draft, schema["format"])


@functools.cache
def _knows_format(draft: int, name: str) -> bool:
    """Whether a draft defines a format, so that it is more than an annotation."""
    nonsense = "\x01 {[( no format allows this \x7f"
    return not jsonschema_rs.is_valid(
        {"format": name}, nonsense, draft=draft, validate_formats=True
    )


def _cause_of_emptiness(schema: Any) -> str | None:
    """The innermost part without which there would be documents."""
    causes = jsonschema_rs.canonical.find_unsatisfiable(schema, **VALIDATION)
    for pointer in sorted(causes, key=lambda pointer: -pointer.count("/"))[:MAX_CAUSES]:
        freed = clone(schema)
        parent, _, token = pointer.rpartition("/")
        if not pointer:
            break
        container = resolve(freed, parent)
        if isinstance(container, list):
            container[int(token)] = {}
        else:
            container[unescape(token)] = {}
        canonical = jsonschema_rs.canonicalize(freed, **VALIDATION)
        if canonical.satisfiability() != jsonschema_rs.canonical.Satisfiability.NO:
            return caller_pointer(pointer)
    return ""
