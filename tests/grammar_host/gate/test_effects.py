"""What tokens do to a document, against the cursor that follows them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host.gate.cursor import START, Cursor, follow
from grammar_host.gate.effects import Effects, essence, string_end
from grammar_host.gate.rules import Rules
from grammar_host.schema import read_schema

TEXTS = st.text('"{}[],: a1\\\n', max_size=8).map(str.encode)


@pytest.mark.parametrize(
    ("text", "closings", "completes", "touches_keys"),
    [
        (b"}", 1, False, False),
        (b"}]} ", 3, False, False),
        (b"{}", 0, True, False),
        (b"{", 0, False, False),
        (b"1", 0, False, False),
        (b"1,", 0, True, False),
        (b" true]", 0, True, False),
        (b'""', 0, True, False),
        (b'"a', 0, False, False),
        (b',"', 0, False, True),
        (b'{ "', 0, False, True),
        (b"},", 1, False, True),
        (b',"}', 0, False, True),
        (b'["', 0, False, False),
        (b'"}', 0, False, False),
    ],
)
def test_effects(text, closings, completes, touches_keys):
    assert Effects.of(text) == Effects(closings, completes, touches_keys)


@pytest.mark.parametrize(
    ("text", "end"),
    [(b'a"b', 2), (b'"', 1), (b'a\\"b', -1), (b'a\\\\"b', 4), (b"a\\", -1), (b"", -1)],
)
def test_the_end_of_a_string(text, end):
    assert string_end(text) == end


RULES = Rules(read_schema({"$comment": "anything"}).document)


@settings(max_examples=400)
@given(text=TEXTS)
def test_closings_are_those_that_a_cursor_makes(text):
    open_containers = b"[" * 20
    inside = follow(START, open_containers, 0, RULES)
    after = follow(inside, open_containers + text, len(open_containers), RULES)
    does = Effects.of(text)
    if isinstance(after, Cursor) and not does.completes:
        depth = -1 if after.frame is None else after.frame.depth
        opened = sum(text.count(bracket) for bracket in (b"{", b"["))
        assert depth >= 19 - does.closings
        assert depth <= 19 - does.closings + opened


@settings(max_examples=400)
@given(begun=TEXTS, text=TEXTS)
def test_what_an_essence_leaves_out_makes_no_difference(begun, text):
    schema = {"not": {"enum": [1, "a", [], {}]}, "additionalProperties": {"minimum": 2}}
    rules = Rules(read_schema(schema).document)
    cursor = follow(START, begun, 0, rules)
    if not isinstance(cursor, Cursor) or cursor.closed or cursor.escaped:
        return
    short = essence(text, in_string=cursor.string_start >= 0)
    outcomes = [follow(cursor, begun + added, len(begun), rules) for added in (text, short)]
    assert isinstance(outcomes[0], Cursor) == isinstance(outcomes[1], Cursor)
