"""JSON between tags is valid when it is closed, whatever the engine enforces."""

import itertools
import json

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import Guide, GuidedBatch, UnsupportedGuideError
from grammar_host.gate.closers import Closers
from grammar_host.gate.cursor import Refusal
from grammar_host.gate.tags import Tags, _State
from grammar_host.schema import read_schema
from tests.grammar_host.common import (
    STOP,
    TOOL,
    VOCAB_SIZE,
    accepts,
    bits,
    compiler,
    mask,
    tokenize,
    tokenizer_info,
    walk,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "day": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    },
    "required": ["tags"],
}
EVEN = {"type": "array", "items": {"type": "integer", "multipleOf": 2}}


def structural_tag(*tags, triggers=("<",)):
    return Guide.structural_tag(
        {
            "type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags)},
        }
    )


def tag(begin, schema, end):
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


GUIDE = structural_tag(tag("<f>", SCHEMA, "</f>"), tag("<even>", EVEN, "</even>"))


def grammar():
    return compiler().compile(GUIDE)


def test_what_the_gate_is_for_is_said():
    assert (grammar().backend, grammar().exact) == ("xgrammar", False)
    (note,) = grammar().notes
    assert "/format/tags/0/content/json_schema/properties/tags/uniqueItems" in note
    assert "/format/tags/1/content/json_schema/items/multipleOf" in note


@pytest.mark.parametrize(
    ("text", "legal"),
    [
        ("no call", True),
        ('<f>{"tags": [1, 2]}</f>', True),
        ('<f>{"tags": [1, 1]}</f>', False),
        ('<f>{"day": "2024-02-29", "tags": []}</f>', True),
        ('<f>{"day": "2023-02-29", "tags": []}</f>', False),
        ("<even>[2, 4]</even>", True),
        ("<even>[2, 3]</even>", False),
        ('a <even>[0]</even> b <f>{"tags": [3]}</f> [1, 3] {"tags": [1, 1]}', True),
        ('a <even>[0]</even> b <f>{"tags": [3, 3]}</f>', False),
        ("<even>[0]</even><even>[1]</even>", False),
    ],
)
def test_every_call_of_a_text_is_checked(text, legal):
    assert accepts(grammar().matcher(), text) is legal


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    tags=st.lists(st.integers(0, 3), max_size=4),
    before=st.text("<f> a", max_size=4),
)
def test_a_call_is_accepted_exactly_if_it_is_valid_however_it_is_split(data, tags, before):
    arguments = {"tags": tags}
    text = f"{before}<f>{json.dumps(arguments)}</f>".encode()
    if b"<" in before.encode():
        return  # the trigger begins a call
    valid = jsonschema.Draft202012Validator(SCHEMA).is_valid(arguments)
    matcher = grammar().matcher()
    ids = {token: i for i, token in enumerate(tokenizer_info().vocabulary) if token}
    while text:
        token = data.draw(st.sampled_from([token for token in ids if text.startswith(token)]))
        legal = ids[token] in bits(mask(matcher))
        assert matcher.accept_token(ids[token]) is legal
        if not legal:
            break
        text = text[len(token) :]
    assert (not text) is valid


@settings(deadline=None, max_examples=20)
@given(
    choices=st.lists(st.integers(0, 10**6), max_size=10),
    text=st.sampled_from(["", '<f>{"tags": [1, ']),
)
def test_the_contract_of_a_matcher(choices, text):
    matcher = grammar().matcher()
    for token in tokenize(text):
        assert matcher.accept_token(token)
    states = [mask(matcher)]
    tokens = []
    for choice in choices:
        tokens += walk(matcher, [choice])
        states.append(mask(matcher))
        accepted = [t for t in range(VOCAB_SIZE) if matcher.validate_tokens([t])]
        assert matcher.is_terminated() or accepted == list(bits(states[-1]))
    fork = matcher.fork()
    matcher.rollback(len(tokens))
    np.testing.assert_array_equal(mask(matcher), states[0])
    np.testing.assert_array_equal(mask(fork), states[-1])
    for token, state in zip(tokens, states[1:], strict=False):
        assert matcher.accept_token(token)
        np.testing.assert_array_equal(mask(matcher), state)


def test_drafts_run_into_and_out_of_a_call():
    batch = GuidedBatch(1, 40, VOCAB_SIZE)
    batch.admit(0, grammar().matcher())
    drafts = tokenize("<even>[2]</even> x")
    assert batch.propose(0, drafts) == drafts
    wrong = tokenize("<even>[3]</even>")
    assert batch.propose(0, wrong) == wrong[: len(tokenize("<even>[3"))]
    assert batch.failure(0) is None


def masks_agree(matcher, tokens):
    """Whether all tokens are accepted; each of them is in its mask exactly if it is."""
    for token in tokens:
        is_legal = token in bits(mask(matcher))
        assert matcher.accept_token(token) == is_legal
        if not is_legal:
            return False
    return True


def test_a_special_token_begins_a_tag_as_its_text_does():
    guide = structural_tag(tag("<|tool|>f=", EVEN, ";"), triggers=("<|tool|>",))
    assert not compiler().compile(guide).exact
    for begin in ([TOOL], tokenize("<|tool|>")):
        for data, is_valid in (("[2]", True), ("[1]", False)):
            matcher = compiler().compile(guide).matcher()
            tokens = [*tokenize("so "), *begin, *tokenize(f"f={data};"), STOP]
            assert all(map(matcher.accept_token, tokens)) == is_valid
            assert masks_agree(compiler().compile(guide).matcher(), tokens) == is_valid


SHORT = {
    "type": "object",
    "properties": {"x": {"type": "string", "pattern": "^.*$", "maxLength": 9}},
}


@pytest.mark.parametrize(
    "ends",
    [("<|tool|>f=", ";"), ("<f>", "<|tool|>"), ("<f>", {"type": "token", "token": TOOL})],
    ids=["begin", "end", "by-id"],
)
def test_inside_of_json_a_special_token_counts_as_its_text(ends):
    """The engine takes it for its name wherever the name may be written, if any text of the tag has it."""
    guide = structural_tag(tag(ends[0], SHORT, ends[1]), triggers=("<",))
    end = [TOOL] if isinstance(ends[1], dict) else tokenize(ends[1])
    assert not compiler().compile(guide).exact
    for before, behind in itertools.product(("", "a", "ab"), repeat=2):
        for inner in (tokenize("<|tool|>"), [TOOL]):
            begin = tokenize(ends[0] + '{"x": "' + before)
            tokens = [*begin, *inner, *tokenize(behind + '"}'), *end, STOP]
            is_valid = len(before + behind) <= 1
            assert masks_agree(compiler().compile(guide).matcher(), tokens) == is_valid


def test_a_special_token_whose_name_closes_json_is_examined():
    tags = Tags({"<f>": read_schema(SHORT).document}, Closers(tokenizer_info()), {TOOL: '"}'})
    text = b'<f>{"x": "0123456789'
    state = tags.follow(_State(), text)
    assert TOOL in bits(tags.candidates(state, text))
    assert isinstance(tags.follow(state, text + tags.written(TOOL)), Refusal)


def test_where_no_gate_can_stand_the_schema_is_refused_with_its_place():
    free = {"type": "sequence", "elements": [{"type": "any_text"}, tag("<f>", SCHEMA, "</f>")]}
    number = {"type": "json_schema", "json_schema": {"type": "number", "multipleOf": 2}}
    behind = {"type": "sequence", "elements": [{"type": "const_string", "value": "n="}, number]}
    for format_, pointer in (
        (free, "/format/elements/1/content/json_schema/properties/"),
        (behind, "/format/elements/1/json_schema/multipleOf"),
        (tag("<f>", {"type": "number", "multipleOf": 2}, "</f>"), "/format/content/json_schema"),
    ):
        with pytest.raises(UnsupportedGuideError, match="does not enforce it here") as info:
            compiler().compile(Guide.structural_tag({"type": "structural_tag", "format": format_}))
        assert info.value.param == "structural_tag"
        assert info.value.pointer is not None
        assert info.value.pointer.startswith(pointer)


def test_a_text_that_is_one_document_is_checked_as_a_whole():
    number = {"type": "json_schema", "json_schema": {"type": "number", "multipleOf": 2}}
    grammar = compiler().compile(Guide.structural_tag({"type": "structural_tag", "format": number}))
    assert not grammar.exact
    assert accepts(grammar.matcher(), "12")
    assert not accepts(grammar.matcher(), "13")


STRING = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}


def test_what_looks_like_a_tag_inside_of_json_is_none():
    guide = structural_tag(tag("<a>", STRING, "</a>"), tag("<even>", EVEN, "</even>"))
    for inner in ("<even>", "<even>[1] ", "<c>"):
        text = f'<a>{{"x": "{inner}"}}</a>'
        assert accepts(compiler().compile(guide).matcher(), text)
        assert accepts(compiler().compile(guide).matcher(), text + "<even>[2]</even>")
        assert not accepts(compiler().compile(guide).matcher(), text + "<even>[3]</even>")


@pytest.mark.parametrize(
    "other",
    [
        {"type": "const_string", "value": "see <even>"},
        tag("<even>x", STRING, "</a>"),
        {"type": "qwen_xml_parameter", "json_schema": STRING},
    ],
)
def test_beside_what_may_be_taken_for_the_tag_no_gate_can_stand(other):
    both = {"type": "or", "elements": [other, tag("<even>", EVEN, "</even>")]}
    with pytest.raises(UnsupportedGuideError, match="does not enforce it here"):
        compiler().compile(Guide.structural_tag({"type": "structural_tag", "format": both}))


def test_a_caller_cannot_switch_the_gate_off():
    schema = {**EVEN, "x-unenforced": [], "x-aside": {}}
    grammar = compiler().compile(structural_tag(tag("<f>", schema, "</f>")))
    assert not accepts(grammar.matcher(), "<f>[3]</f>")
    assert accepts(grammar.matcher(), "<f>[4]</f>")


def test_one_tag_cannot_stand_for_two_gated_schemas():
    guide = structural_tag(tag("<f>", SCHEMA, "</f>"), tag("<f>", EVEN, "</even>"))
    with pytest.raises(UnsupportedGuideError):
        compiler().compile(guide)


def test_what_is_exact_needs_no_gate():
    plain = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    exact = compiler().compile(structural_tag(tag("<f>", plain, "</f>")))
    assert (exact.exact, exact.notes) == (True, ())
    assert accepts(exact.matcher(), '<f>{"a": "b"}</f>')
    assert not accepts(exact.matcher(), "<f>{}</f>")
    assert STOP in bits(mask(exact.matcher()))
