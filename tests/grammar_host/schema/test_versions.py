"""What engines are offered allows at least the valid documents, and exactly those if it says so."""

import json
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grammar_host import Guide, GuideError
from grammar_host.plan import Planner
from grammar_host.schema import INEXACT, read_schema, versions
from grammar_host.schema.order import restore_property_order
from grammar_host.schema.patterns import to_rust
from tests.grammar_host.common import STOP, VOCAB_SIZE, compiler, tokenize, tokenizer_info
from tests.grammar_host.gate.test_gate import SCHEMAS, VALUES, is_valid, readable


@settings(deadline=None, max_examples=150)
@given(
    schema=SCHEMAS,
    values=st.lists(VALUES, min_size=3, max_size=6),
    backend=st.sampled_from(sorted(INEXACT)),
)
def test_no_version_excludes_a_valid_document(schema, values, backend):
    assume(readable(schema))
    for version in versions(read_schema(schema), backend):
        for value in values:
            if is_valid(schema, value):
                # Patterns are written for another dialect; the ones here mean the same in both.
                assert is_valid(version.document, value), version


@settings(deadline=None, max_examples=60)
@given(
    schema=SCHEMAS,
    values=st.lists(VALUES, min_size=3, max_size=6),
    backend=st.sampled_from(["llguidance", "xgrammar"]),
)
def test_what_is_called_exact_lets_no_invalid_document_pass(schema, values, backend):
    assume(readable(schema))
    try:
        plan, compiled = planner().plan(Guide.json_schema(schema), backend)
    except GuideError:
        assume(False)
    assume(plan.exact)
    for value in values:
        if not is_valid(schema, value):
            matcher = compiled.new_matcher(frozenset({STOP}))
            tokens = tokenize(json.dumps(value, ensure_ascii=False))
            assert not all(matcher.accept_token(token) for token in [*tokens, STOP])


def planner():
    return compiler()._planner


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        ({"minimum": 2**60}, "minimum"),
        ({"enum": [9007199254740993, "a"]}, "enum"),
        ({"const": -9223372036854775800}, "const"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
    ],
)
def test_what_an_engine_cannot_do_is_left_to_the_gate(schema, kept):
    plan, _ = Planner(tokenizer_info()).plan(Guide.json_schema(schema), "llguidance")
    assert not plan.exact
    assert kept in json.loads(plan.gate)
    assert f"/{kept}" in plan.notes[0]


def test_properties_keep_the_callers_order():
    schema = {
        "type": "object",
        "properties": {"z": {"type": "integer"}, "b": {"not": {"type": "null"}}, "a": {}},
        "allOf": [{"properties": {"y": {}, "c": {}}}],
        "required": ["z"],
    }
    read = read_schema(schema)
    restored = restore_property_order(read.canonical, read.document)
    restored = restored[0] if isinstance(restored, tuple) else restored
    mentioned = list(restored["properties"])
    assert mentioned == [name for name in "zbayc" if name in mentioned]
    assert mentioned[:2] == ["z", "b"]


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        (r"^.$", "\n", False),
        (r"^.$", "\u2028", False),
        (r"^.$", "😀", True),
        (r"^\s$", "\ufeff", True),
        (r"^\d$", "٣", False),
        (r"^\w$", "é", False),
        (r"^[^a]$", "\n", True),
        (r"^[[a]$", "[", True),
        (r"^\cA$", "\x01", True),
        (r"^\u0041$", "A", True),
        (r"^\/$", "/", True),
        (r"^[\d\-]$", "-", True),
        (r"^\S$", "a", True),
        (r"^\D\W$", "a-", True),
    ],
)
def test_patterns_mean_what_they_mean_in_ecma_262(pattern, text, matches):
    guide = Guide.json_schema({"type": "string", "pattern": pattern})
    matcher = compiler(VOCAB_SIZE, "llguidance").compile(guide).matcher()
    tokens = [*tokenize(json.dumps(text, ensure_ascii=False)), STOP]
    assert all(matcher.accept_token(token) for token in tokens) is matches


def test_patterns_that_need_no_translation_stay():
    assert to_rust("^[a-z]{2,3}(x|y)?$") == "^[a-z]{2,3}(x|y)?$"


def test_a_plan_survives_pickling_and_says_what_is_compiled():
    import pickle

    plan, _ = Planner(tokenizer_info()).plan(Guide.json_schema({"uniqueItems": True}), "auto")
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert replace(plan, gate=None).exact
    assert jsonschema.Draft202012Validator(json.loads(plan.gate)).is_valid([1])
