"""Where in a JSON document a text stands, and what it just finished writing."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from grammar_host.gate.rules import Nodes, RecordingRules, Rules, written

_IN_STRING = re.compile(rb'["\\]')
_OUTSIDE = re.compile(rb'["{}\[\],]')


@dataclass(frozen=True, slots=True)
class Frame:
    """An open object or array.

    Attributes:
        parent: the container around it.
        start: offset of its bracket in the text.
        is_object: or an array.
        nodes: the schemas that it must satisfy.
        keys: an object's keys so far, as they are written between their quotes.
        key: the key of the value being written; None while a key is due.
        index: an array's item being written.
    """

    parent: Frame | None
    start: int
    is_object: bool
    nodes: Nodes
    keys: frozenset[bytes] = frozenset()
    key: bytes | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position behind some text. Immutable, so that going back is taking an old one.

    Attributes:
        frame: the innermost open container; None outside of the outermost.
        string_start: offset of the opening quote of the string being written; -1 outside.
        escaped: just behind a backslash in a string.
        closed: the document's outermost container or string has been closed.
    """

    frame: Frame | None = None
    string_start: int = -1
    escaped: bool = False
    closed: bool = False


START = Cursor()


def follow(
    cursor: Cursor, text: bytes, position: int, rules: Rules | RecordingRules
) -> Cursor | None:
    """Moves a cursor to the end of a text.

    Args:
        cursor: the state behind `text[:position]`.
        text: the document so far, and what is added to it.
        position: where the addition begins.
        rules: what the parts must satisfy.

    Returns:
        The new state; None if the addition finishes a part that violates the rules.
    """
    frame, string_start, escaped = cursor.frame, cursor.string_start, cursor.escaped
    while position < len(text) and not cursor.closed:
        if escaped:
            escaped = False
            position += 1
            continue
        if string_start >= 0:
            match = _IN_STRING.search(text, position)
            if match is None:
                break
            position = match.end()
            if match[0] == b"\\":
                escaped = True
                continue
            string = text[string_start:position]
            string_start = -1
            if frame is not None and frame.is_object and frame.key is None:
                key = string[1:-1]
                if key in frame.keys or not _may_have(frame, key, rules):
                    return None
                frame = Frame(frame.parent, frame.start, True, frame.nodes, frame.keys | {key}, key)
                continue
            if not rules.permit_string(nodes_of_value(frame, rules), string):
                return None
            if frame is None:
                return Cursor(closed=True)
            continue
        match = _OUTSIDE.search(text, position)
        if match is None:
            break
        position = match.end()
        byte = match[0]
        if byte == b'"':
            string_start = position - 1
        elif byte in b"{[":
            nodes = nodes_of_value(frame, rules)
            frame = Frame(frame, position - 1, byte == b"{", nodes)
        elif frame is None:
            continue  # a stray byte: the engine refuses it
        elif byte == b",":
            if frame.is_object and keys_left(frame, b"", rules) == []:
                return None
            frame = Frame(
                frame.parent,
                frame.start,
                frame.is_object,
                frame.nodes,
                frame.keys,
                None,
                frame.index + 1,
            )
        else:
            if not rules.permit(frame.nodes, text[frame.start : position]):
                return None
            frame = frame.parent
            if frame is None:
                return Cursor(closed=True)
    moved = Cursor(frame, string_start, escaped, cursor.closed)
    if frame is not None and writes_key(moved):
        begun = text[string_start + 1 :]
        if b"\\" not in begun and keys_left(frame, begun, rules) == []:
            return None
    return moved


def writes_key(cursor: Cursor) -> bool:
    """Whether the string being written is the key of an object."""
    frame = cursor.frame
    return cursor.string_start >= 0 and frame is not None and frame.is_object and frame.key is None


def keys_left(frame: Frame, begun: bytes, rules: Rules | RecordingRules) -> list[bytes] | None:
    """The keys that an object may still get and that begin like this; None if any."""
    names = rules.names(frame.nodes) if frame.is_object else None
    if names is None:
        return None
    return [name for name in names if name.startswith(begun) and name not in frame.keys]


def _may_have(frame: Frame, key: bytes, rules: Rules | RecordingRules) -> bool:
    names = rules.names(frame.nodes)
    return names is None or key in names or (b"\\" in key and written(_unescaped(key)) in names)


def nodes_of_value(frame: Frame | None, rules: Rules | RecordingRules) -> Nodes:
    """The schemas that the value being written in a container must satisfy."""
    if frame is None:
        return rules.root
    if not frame.is_object:
        return rules.child(frame.nodes, frame.index)
    return rules.child(frame.nodes, _unescaped(frame.key or b""))


def _unescaped(key: bytes) -> str:
    if b"\\" not in key:
        return key.decode("utf-8", "replace")
    try:
        return str(json.loads(f'"{key.decode()}"'))
    except ValueError:  # the engine lets no such key pass
        return ""
