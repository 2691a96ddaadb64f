"""Structural tags: free text with guided parts between tags, in XGrammar's format.

A document is `{"type": "structural_tag", "format": {...}}`; `grammar_host.tag_checks` lists the
formats, which may hold one another. This module reads documents, finds the languages inside of
them, and puts others in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grammar_host.errors import InvalidGuideError
from grammar_host.tag_checks import PARAM, check_legacy_document

PartKind = Literal["json_schema", "regex", "grammar", "lark"]


@dataclass(frozen=True)
class TagPart:
    """A language inside of a structural tag.

    Attributes:
        kind: which language, as in `Guide.kind`.
        pointer: JSON pointer of `value` in the document.
        value: the schema, or the text of the regex or grammar.
        format_pointer: JSON pointer of the format that holds it.
        format: that format, with its options.
    """

    kind: PartKind
    pointer: str
    value: Any
    format_pointer: str
    format: Mapping[str, Any]


def read_tag(value: Mapping[str, Any]) -> dict[str, Any]:
    """Brings a structural tag into the form with a `format`, which is then still to be checked.

    Args:
        value: a document with a `format`, which is returned as it is, or the older form that vLLM
            and SGLang take as well: `{"type": "structural_tag", "structures": [{"begin": ...,
            "schema": ..., "end": ...}], "triggers": [...]}`.

    Raises:
        InvalidGuideError: the older form is malformed; pointers are those of that form.
    """
    if "structures" not in value:
        return dict(value)
    if "format" in value:
        raise InvalidGuideError(PARAM, "'structures' and 'format' exclude each other", pointer="")
    check_legacy_document(value)
    tags = [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure["schema"]},
            "end": structure["end"],
        }
        for structure in value["structures"]
    ]
    triggered = {"type": "triggered_tags", "triggers": list(value["triggers"]), "tags": tags}
    return {"type": "structural_tag", "format": triggered}


def tag_formats(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every format of a checked document, outer before inner, as (JSON pointer, format).

    A tag in a list of tags may lack the field `type`.
    """
    stack = [("/format", document["format"])]
    while stack:
        pointer, node = stack.pop()
        yield pointer, node
        stack.extend(reversed([*_children(pointer, node)]))


def tag_parts(document: Mapping[str, Any]) -> Iterator[TagPart]:
    """The languages inside of a checked document, in its order."""
    for pointer, node in tag_formats(document):
        match node.get("type"):
            case "json_schema" | "qwen_xml_parameter":
                yield _part("json_schema", "json_schema", pointer, node)
            case "regex":
                yield _part("regex", "pattern", pointer, node)
            case "grammar" if node.get("syntax") == "lark":
                yield _part("lark", "grammar", pointer, node)
            case "grammar":
                yield _part("grammar", "grammar", pointer, node)


def embedded_schemas(document: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The JSON Schemas inside of a checked document, as (JSON pointer, schema), in its order.

    References within such a schema are relative to the schema, not to the document.
    """
    return [
        (part.pointer, part.value) for part in tag_parts(document) if part.kind == "json_schema"
    ]


def replace_part(document: Mapping[str, Any], pointer: str, value: Any) -> dict[str, Any]:
    """A copy of a document with another value at a pointer that this module gave out.

    Only the containers on the way are copied.
    """
    copy: dict[str, Any] = dict(document)
    container: Any = copy
    *path, last = pointer.split("/")[1:]
    for token in path:
        key = _key(container, token)
        inner = container[key]
        container[key] = dict(inner) if isinstance(inner, Mapping) else list(inner)
        container = container[key]
    container[_key(container, last)] = value
    return copy


def premature_stops(
    document: Mapping[str, Any], is_stop: Callable[[int | str], bool]
) -> Iterator[str]:
    """Where a checked document wants a stop token although something must follow it.

    A stop token ends the generation, so such a text can never be completed. Text that spells a
    stop token is no such place: it can be written with other tokens.

    Args:
        document: the structural tag.
        is_stop: whether a token, given by id or text, is a stop token.

    Yields:
        JSON pointers of the tokens.
    """
    stack: list[tuple[str, Any, bool]] = [("/format", document["format"], False)]
    while stack:
        pointer, node, more = stack.pop()
        if isinstance(node, Mapping) and "token" in node:
            if more and is_stop(node["token"]):
                yield pointer
            continue
        stack.extend(_followed(pointer, node, more))


def may_be_empty(node: Any) -> bool:
    """Whether a format, or the beginning or end of a tag, may be the empty text.

    Of a regex or grammar it is not known; the answer is True.
    """
    if isinstance(node, str):
        return not node
    if isinstance(node, Sequence):
        return any(map(may_be_empty, node))
    match node.get("type", "tag" if "begin" in node else "token"):
        case "const_string":
            return not node["value"]
        case "token" | "exclude_token" | "json_schema" | "qwen_xml_parameter":
            return False
        case "triggered_tags" | "token_triggered_tags" | "tags_with_separator":
            return not node.get("at_least_one", False)
        case "sequence":
            return all(map(may_be_empty, node["elements"]))
        case "or":
            return any(map(may_be_empty, node["elements"]))
        case "tag":
            return all(may_be_empty(node[key]) for key in ("begin", "content", "end"))
        case "plus":
            return may_be_empty(node["content"])
        case "repeat":
            return node["min"] == 0 or may_be_empty(node["content"])
    return True


def _part(kind: PartKind, field: str, pointer: str, node: Mapping[str, Any]) -> TagPart:
    return TagPart(kind, f"{pointer}/{field}", node[field], pointer, node)


def _key(container: Any, token: str) -> Any:
    return int(token) if isinstance(container, list) else token


def _children(pointer: str, node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if "content" in node:
        yield f"{pointer}/content", node["content"]
    for key in ("elements", "tags"):
        for index, child in enumerate(node.get(key, ())):
            yield f"{pointer}/{key}/{index}", child
    for index, rule in enumerate(node.get("rules", ())):
        yield f"{pointer}/rules/{index}/1", rule[1]


def _followed(
    pointer: str, node: Mapping[str, Any], more: bool
) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """The children of a format and the tokens it names, each with whether something must follow.

    `more` says that of the format itself.
    """
    if "begin" in node:
        chain = [(f"{pointer}/{key}", node[key]) for key in ("begin", "content", "end")]
    elif node.get("type") == "sequence":
        chain = [*_children(pointer, node)]
    else:
        again = node.get("type") == "repeat" and node["min"] > 1
        for where, child in _children(pointer, node):
            yield where, child, more or again
        if node.get("type") == "token_dispatch":
            for index, (token, content) in enumerate(node["rules"]):
                needed = more or not may_be_empty(content)
                yield f"{pointer}/rules/{index}/0", {"token": token}, needed
        return
    for where, part in reversed(chain):
        if isinstance(part, Mapping):
            yield where, part, more
        more = more or not may_be_empty(part)
