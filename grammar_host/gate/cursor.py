"""Where in a JSON document a text stands, and what it just finished writing."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from grammar_host.gate.effects import is_malformed
from grammar_host.gate.rules import Nodes, Rules

MAX_NESTING = 256
"""Containers that may be open at once. Readers recurse; Python's gives up at a thousand."""

BLANKS = b" \t\n\r"
_IN_STRING = re.compile(rb'["\\]')
_NO_BLANK = re.compile(rb"[^ \t\n\r:]")
_SCALAR_END = re.compile(rb'[ \t\n\r,:"{}\[\]]')


class Frame(NamedTuple):
    """An open object or array.

    Attributes:
        parent: the container around it.
        start: offset of its bracket in the text.
        is_object: or an array.
        nodes: the schemas that it must satisfy.
        depth: containers around it.
        closings: how many containers must be closed to close one that is to be examined.
        is_set: whether no two items of the array may be the same.
        seen: what must not come again: an object's keys, the items of a set; as they are written.
        key: the key of the value being written; None while a key is due, and in arrays.
        item: number of the item being written in an array.
    """

    parent: Frame | None
    start: int
    is_object: bool
    nodes: Nodes
    depth: int
    closings: int
    is_set: bool
    seen: frozenset[bytes] = frozenset()
    key: str | None = None
    item: int = 0


class Cursor(NamedTuple):
    """A position behind some text. Immutable, so that going back is taking an old one.

    Attributes:
        frame: the innermost open container; None outside of the outermost.
        string_start: offset of the opening quote of the string being written; -1 outside.
        escaped: just behind a backslash in a string.
        scalar_start: offset of the number or literal being written; -1 elsewhere.
        closed: the document's outermost container or string has been closed.
    """

    frame: Frame | None = None
    string_start: int = -1
    escaped: bool = False
    scalar_start: int = -1
    closed: bool = False

    @property
    def in_key(self) -> bool:
        """Whether a key is due or being written."""
        frame = self.frame
        return frame is not None and frame.is_object and frame.key is None


class Refusal(NamedTuple):
    """Why a text must not go on like this.

    Attributes:
        nodes: the schemas that a part, or the container so far, violates; none if something else
            is wrong.
        part: that part.
        reason: what is wrong; empty where the schemas say it.
    """

    nodes: Nodes
    part: bytes
    reason: str = ""


_NO_KEY = "write a key that the object must not have"
_REPEATS = "repeat a key"
NO_STRING = "write a control character or malformed UTF-8 in a string"

START = Cursor()


def follow(cursor: Cursor, text: bytes, position: int, rules: Rules) -> Cursor | Refusal:
    """Moves a cursor to the end of a text.

    Args:
        cursor: the state behind `text[:position]`.
        text: the document so far, and what is added to it.
        position: where the addition begins.
        rules: what the parts must satisfy.

    Returns:
        The new state, or why the addition must not come here.
    """
    while position < len(text) and not cursor.closed:
        if cursor.string_start >= 0:
            step = _in_string(cursor, text, position, rules)
        elif cursor.scalar_start >= 0:
            step = _in_scalar(cursor, text, position, rules)
        else:
            step = _between(cursor, text, position, rules)
        if isinstance(step, Refusal):
            return step
        cursor, position = step
    return cursor


def nodes_of_value(frame: Frame | None, rules: Rules) -> Nodes:
    """The schemas that the value being written in a container must satisfy."""
    if frame is None:
        return rules.root
    if not frame.is_object:
        return rules.child(frame.nodes, frame.item)
    return () if frame.key is None else rules.child(frame.nodes, frame.key)


def keys_left(frame: Frame, begun: bytes, rules: Rules) -> list[bytes] | None:
    """The keys that an object may still get and that begin like this; None if any may come."""
    keys = rules.keys(frame.nodes)
    if keys is None or b"\\" in begun:  # escapes are not followed
        return None
    return [key for key in keys if key.startswith(begun) and key not in frame.seen]


_Step = tuple[Cursor, int] | Refusal


def _in_string(cursor: Cursor, text: bytes, position: int, rules: Rules) -> _Step:
    start = cursor.string_start
    match = None if cursor.escaped else _IN_STRING.search(text, position)
    end = position + 1 if cursor.escaped else len(text) if match is None else match.start()
    # Not at the closing quote: whatever stands before that, no other text could mend the string.
    if is_malformed(text, position, end):
        return Refusal((), text[start:], NO_STRING)
    if cursor.escaped:
        return Cursor(cursor.frame, start), end
    if match is None:
        frame, begun = cursor.frame, text[start:]
        if frame is not None and cursor.in_key and keys_left(frame, begun, rules) == []:
            return Refusal(frame.nodes, begun, _NO_KEY)
        return cursor, len(text)
    position = match.end()
    if match[0] == b"\\":
        return Cursor(cursor.frame, start, escaped=True), position
    if cursor.in_key:
        ended = _end_key(cursor, text[start:position], rules)
    else:
        ended = _end_value(
            cursor.frame, nodes_of_value(cursor.frame, rules), text, start, position, rules
        )
    return ended if isinstance(ended, Refusal) else (ended, position)


def _in_scalar(cursor: Cursor, text: bytes, position: int, rules: Rules) -> _Step:
    match = _SCALAR_END.search(text, position)
    if match is None:
        return cursor, len(text)
    end = match.start()
    nodes = nodes_of_value(cursor.frame, rules)
    ended = _end_value(cursor.frame, nodes, text, cursor.scalar_start, end, rules)
    return ended if isinstance(ended, Refusal) else (ended, end)


def _between(cursor: Cursor, text: bytes, position: int, rules: Rules) -> _Step:
    match = _NO_BLANK.search(text, position)
    if match is None:
        return cursor, len(text)
    frame, position, byte = cursor.frame, match.end(), match[0]
    if byte == b'"':
        if frame is not None and cursor.in_key and keys_left(frame, byte, rules) == []:
            return Refusal(frame.nodes, byte, _NO_KEY)
        return Cursor(frame, string_start=position - 1), position
    if byte in b"{[":
        opened = _open(frame, position - 1, byte == b"{", rules)
        return opened if isinstance(opened, Refusal) else (Cursor(opened), position)
    if byte not in b",}]":
        return Cursor(frame, scalar_start=position - 1), position
    if frame is None:
        return cursor, position  # the engine refuses it
    if byte == b",":
        if frame.is_object and keys_left(frame, b'"', rules) == []:
            return Refusal(frame.nodes, byte, _NO_KEY)
        return Cursor(frame._replace(key=None, item=frame.item + 1)), position
    ended = _end_value(frame.parent, frame.nodes, text, frame.start, position, rules)
    return ended if isinstance(ended, Refusal) else (ended, position)


def _open(parent: Frame | None, start: int, is_object: bool, rules: Rules) -> Frame | Refusal:
    nodes = nodes_of_value(parent, rules)
    depth = 0 if parent is None else parent.depth + 1
    if depth >= MAX_NESTING:
        return Refusal((), b"", f"nest more than {MAX_NESTING} containers")
    closings = 1
    if not rules.matters(nodes):
        closings = MAX_NESTING if parent is None else parent.closings + 1
    is_set = not is_object and rules.unique(nodes)
    if parent is not None and parent.is_set:
        closings = 1  # an item of a set is compared when it is closed
    return Frame(parent, start, is_object, nodes, depth, closings, is_set)


def _end_key(cursor: Cursor, written: bytes, rules: Rules) -> Cursor | Refusal:
    frame = cursor.frame
    assert frame is not None
    if written in frame.seen:
        return Refusal((), written, _REPEATS)
    names = rules.name(frame.nodes)
    if rules.matters(names) and not rules.permit(names, written):
        return Refusal(names, written)
    try:
        key = str(json.loads(written))
    except ValueError:  # the engine lets no such key pass
        key = ""
    if not rules.allows_key(frame.nodes, key):
        return Refusal(frame.nodes, written, _NO_KEY)
    return Cursor(frame._replace(seen=frame.seen | {written}, key=key))


def _end_value(
    frame: Frame | None, nodes: Nodes, text: bytes, start: int, end: int, rules: Rules
) -> Cursor | Refusal:
    """Behind `text[start:end]`, a value in a container, given the schemas of the value."""
    written = text[start:end]
    if rules.matters(nodes) and not rules.permit(nodes, written):
        return Refusal(nodes, written)
    if frame is None:
        return Cursor(closed=True)
    if frame.is_set:
        if written in frame.seen:
            return Refusal(frame.nodes, text[frame.start : end] + b"]")
        frame = frame._replace(seen=frame.seen | {written})
    return Cursor(frame)
