"""The JSON Schemas inside of structural tags: rewritten for the engine, gated where it is inexact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grammar_host.errors import GuideError, UnsupportedGuideError
from grammar_host.guide import Guide
from grammar_host.schema import Schema, Version, inexact_keywords, read_schema, versions
from grammar_host.tags import TagPart, replace_part, tag_formats, tag_parts

_FREE_TEXT = frozenset({"any_text", "any_tokens", "exclude_token", "grammar", "regex"})
"""Formats whose text may happen to spell the beginning of a tag."""


@dataclass(frozen=True)
class TagSchemas:
    """What becomes of the schemas of a structural tag.

    Attributes:
        guide: the structural tag with the schemas that the engine gets.
        gated: from the text that begins a tag to JSON of the schema of what is behind it, where
            the engine enforces that schema only in part.
        whole: the same where the text is one JSON document and nothing else; None if it is not.
        inexact: JSON pointers of what it does not enforce exactly.
    """

    guide: Guide
    gated: Mapping[str, str]
    whole: str | None
    inexact: tuple[str, ...]


def prepare_tag_schemas(guide: Guide, backend: str) -> TagSchemas:
    """Rewrites the schemas inside of a structural tag for an engine.

    Args:
        guide: of kind `structural_tag`.
        backend: the engine, a key of `grammar_host.schema.INEXACT`.

    Raises:
        UnsupportedGuideError: a schema that the engine does not enforce exactly, where no gate can
            stand: not directly between two tags, or not written as JSON.
        GuideError: a malformed or unsatisfiable schema; pointers are those of the tag document.
    """
    document = guide.document
    gated: dict[str, str] = {}
    whole: str | None = None
    inexact: list[str] = []
    for part in tag_parts(document):
        if part.kind != "json_schema":
            continue
        if not _is_json(part):
            _require_exact(part, backend, inexact_keywords(part.value, backend))
            continue
        schema = _read(part)
        version = _best(schema, backend)
        document = replace_part(document, part.pointer, version.document)
        if not version.inexact:
            continue
        inexact.extend(part.pointer + pointer for pointer in version.inexact)
        text = json.dumps(schema.document, ensure_ascii=False)
        begin = _begin_of(guide.document, part)
        if part.format_pointer == "/format":
            whole = text
        elif begin is None or not schema.ends_itself() or gated.setdefault(begin, text) != text:
            _require_exact(part, backend, version.inexact)
    text = json.dumps(document, ensure_ascii=False)
    return TagSchemas(replace(guide, text=text), gated, whole, tuple(inexact))


def _is_json(part: TagPart) -> bool:
    node = part.format
    return (
        node["type"] == "json_schema"
        and node.get("style", "json") == "json"
        and not node.get("excludes")
    )


def _read(part: TagPart) -> Schema:
    try:
        return read_schema(part.value)
    except GuideError as error:
        pointer = part.pointer + (error.pointer or "")
        raise type(error)("structural_tag", error.reason, pointer=pointer) from None


def _best(schema: Schema, backend: str) -> Version:
    """The first version that the engine enforces exactly, else the first one."""
    offered = list(versions(schema, backend))
    return next((version for version in offered if not version.inexact), offered[0])


def _begin_of(document: Mapping[str, Any], part: TagPart) -> str | None:
    """The text that always and only stands before the part; None if there is no such text."""
    found: str | None = None
    for pointer, node in tag_formats(document):
        if node.get("type") in _FREE_TEXT:
            return None
        if f"{pointer}/content" == part.format_pointer and isinstance(node.get("begin"), str):
            found = node["begin"] or None
    return found


def _require_exact(part: TagPart, backend: str, inexact: Any) -> None:
    for pointer in inexact:
        raise UnsupportedGuideError(
            "structural_tag",
            f"{backend} does not enforce it here; leave it out, or put an object's schema directly "
            "between the begin and the end of a tag",
            pointer=part.pointer + pointer,
        )
