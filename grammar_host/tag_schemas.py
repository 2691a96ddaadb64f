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
    begins = _begins(document)
    found: list[tuple[TagPart, Schema, Version]] = []
    # With one gate there are gates for all, or the text of a part could be taken for a tag.
    gateable = True
    for part in tag_parts(document):
        if part.kind != "json_schema":
            continue
        if not _is_json(part):
            _require_exact(part, backend, inexact_keywords(part.value, backend))
            gateable = False
            continue
        schema = _read(part)
        gateable = gateable and part.format_pointer in begins and schema.ends_itself()
        found.append((part, schema, _best(schema, backend)))
    schemas: dict[str, str] = {}
    whole: str | None = None
    inexact: list[str] = []
    for part, schema, version in found:
        document = replace_part(document, part.pointer, version.document)
        text = json.dumps(schema.document, ensure_ascii=False)
        inexact.extend(part.pointer + pointer for pointer in version.inexact)
        if part.format_pointer == "/format":
            whole = text if version.inexact else None
        elif gateable:
            schemas[begins[part.format_pointer]] = text
        else:
            _require_exact(part, backend, version.inexact)
    offered = replace(guide, text=json.dumps(document, ensure_ascii=False))
    gated = schemas if inexact and whole is None else {}
    return TagSchemas(offered, gated, whole, tuple(inexact))


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


def _begins(document: Mapping[str, Any]) -> dict[str, str]:
    """The texts that always and only stand before a part, by the pointer of the part's format.

    Empty if some other text of the document could be taken for one of them.
    """
    begins: dict[str, str] = {}
    others: list[str] = []
    for pointer, node in tag_formats(document):
        if node.get("type") in _FREE_TEXT:
            return {}
        for key in ("begin", "end", "value", "separator"):
            texts = node.get(key, ())
            texts = [texts] if isinstance(texts, str) else texts
            others.extend(text for text in texts if isinstance(text, str))
        begin = node.get("begin")
        if isinstance(begin, str) and begin:
            begins[f"{pointer}/content"] = begin
            others.remove(begin)
    texts = list(begins.values())
    apart = all(
        not other.startswith(text)
        for index, text in enumerate(texts)
        for other in texts[:index] + texts[index + 1 :]
    )
    if not apart or any(text in other for text in texts for other in others):
        return {}
    return begins


def _require_exact(part: TagPart, backend: str, inexact: Any) -> None:
    for pointer in inexact:
        raise UnsupportedGuideError(
            "structural_tag",
            f"{backend} does not enforce it here; leave it out, or put an object's schema directly "
            "between the begin and the end of a tag",
            pointer=part.pointer + pointer,
        )
