"""Which engine gets which form of a guide, and what is left to the gate."""

import functools
import json
import pickle

import numpy as np
import pytest

from grammar_host import (
    EmptyLanguageError,
    GrammarError,
    GrammarMatcher,
    GrammarTooComplexError,
    Guide,
    InvalidGuideError,
    UnsupportedGuideError,
)
from grammar_host.backends.base import Backend, CompiledGuide
from grammar_host.backends.scripted import Script, ScriptedBackend, ScriptedMatcher
from grammar_host.gate import Closers, with_gate
from grammar_host.plan import EngineNotLoaded, Plan, Planner, Trial
from grammar_host.schema.reading import UNENFORCED
from tests.grammar_host.common import STOP, VOCAB_SIZE, accepts, tokenizer_info


@functools.cache
def planner():
    return Planner(tokenizer_info())


def plan(schema, backend="auto", **options):
    return planner().plan(Guide.json_schema(schema, **options), backend)[0]


def served(schema, text, backend="auto"):
    """Whether a generation may write the text."""
    made = plan(schema, backend)
    new_matcher = planner().compile(made).new_matcher
    if made.gate is not None:
        closers = Closers(tokenizer_info())
        new_matcher = with_gate(new_matcher, json.loads(made.gate), tokenizer_info(), closers)
    return accepts(GrammarMatcher(new_matcher(frozenset({STOP})), VOCAB_SIZE, {STOP}), text)


@pytest.mark.parametrize(
    ("schema", "unenforced"),
    [
        ({"type": "string"}, None),
        ({"properties": {"x-guidance": {"type": "null"}}}, None),
        ({"items": {"format": "uuid"}}, None),
        ({"items": {"format": "email"}}, {"format"}),
        ({"not": {"type": "null"}}, None),
        ({"type": "array", "uniqueItems": True}, {"uniqueItems"}),
        ({"type": "string", "pattern": "(?!a)b"}, {"pattern"}),
        ({"type": "string", "pattern": "a++"}, {"pattern"}),
        ({"type": "number", "multipleOf": 0.25}, {"multipleOf"}),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, {"exclusiveMinimum"}),
        ({"const": 2**53 + 1}, {"const"}),
        (
            {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {}, "b": {}}},
            None,
        ),
        ({"patternProperties": {"a": {"minimum": 1}, "b": {"maximum": 3}}}, {"patternProperties"}),
    ],
)
def test_the_gate_is_told_what_to_look_at(schema, unenforced):
    made = plan(schema, "llguidance")
    assert made.exact is (unenforced is None)
    if unenforced is None:
        assert made.notes == ()
        return
    gate = json.loads(made.gate)
    assert unenforced <= set(gate[UNENFORCED])
    assert all(keyword in json.dumps(gate) for keyword in unenforced)
    (note,) = made.notes
    assert any(f"/{keyword}" in note for keyword in unenforced)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "array", "uniqueItems": True}, "[1, 2]", "[1, 1]"),
        ({"type": "string", "pattern": "(?!a)b"}, '"ab"', '"a"'),
        ({"type": "number", "multipleOf": 0.25}, "1.5", "0.3"),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, "1.2", "1"),
        ({"const": 2**53 + 1}, str(2**53 + 1), str(2**53)),
        ({"maximum": 2**60 + 1}, str(2**60 + 1), str(2**60 + 2)),
        (
            {"patternProperties": {"a": {"minimum": 1}, "b": {"maximum": 3}}},
            '{"ab": 2}',
            '{"ab": 4}',
        ),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"b": 1, "a": 2}', '{"a": 2}'),
        ({"propertyNames": {"maxLength": 1}}, '{"a": 1}', '{"ab": 1}'),
        (
            {"$defs": {"t": {"items": {"$ref": "#/$defs/t"}}}, "maxItems": 1, "$ref": "#/$defs/t"},
            "[[1, 2]]",
            "[1, 2]",
        ),
        (
            {
                "properties": {"b": {"$ref": "#/properties/a"}, "a": {"format": "date"}},
                "not": {"required": ["c"]},
            },
            '{"b": "2023-02-28", "a": "2024-02-29"}',
            '{"b": "2023-02-29"}',
        ),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "llguidance", "xgrammar"])
def test_together_they_enforce_everything(schema, valid, invalid, backend):
    assert served(schema, valid, backend)
    assert not served(schema, invalid, backend)


@pytest.mark.parametrize(
    ("schema", "documents"),
    [
        # Where the engine is exact, properties come in the schema's order.
        ({"properties": {"b": {}, "a": {}}}, {'{"b": 1, "a": 2}': True, '{"a": 2, "b": 1}': False}),
        # Where the gate looks at objects anyway, they come in any order, each once.
        (
            {"type": "object", "properties": {"b": {"uniqueItems": True}, "a": {}}},
            {'{"b": 1, "a": 2}': True, '{"a": 2, "b": 1}': True, '{"a": 1, "a": 1}': False},
        ),
    ],
)
def test_property_order(schema, documents):
    assert {text: served(schema, text) for text in documents} == documents


def test_a_pattern_that_costs_too_much_is_left_to_the_gate():
    schema = {"type": "string", "maxLength": 5000, "pattern": r"^(?:\S+\s+){0,99}\S+$"}
    made = plan(schema, "llguidance")
    assert "pattern" in json.loads(made.gate)[UNENFORCED]
    assert served(schema, '"two words"')
    assert not served(schema, '" "')


def test_options_reach_the_engine_and_reasoning_does_not():
    guide = Guide.json_schema({"properties": {"a": {}}}, strict=True, max_whitespace=0)
    made, _ = planner().plan(guide.after_reasoning(), "auto")
    assert made.guide.max_whitespace == 0
    assert made.guide.reasoning_end is None
    assert json.loads(made.guide.text)["additionalProperties"] is False
    assert not made.guide.strict


def test_what_was_decided_while_reading_is_noted():
    (note,) = plan({"items": [{"type": "null"}]}).notes
    assert "draft-07" in note


def test_a_plan_can_be_sent_and_compiled():
    made = plan({"uniqueItems": True})
    assert pickle.loads(pickle.dumps(made)) == made
    assert isinstance(planner().compile(made), CompiledGuide)


@pytest.mark.parametrize(
    ("schema", "backend", "error"),
    [
        ({"allOf": [{"type": "null"}, {"type": "string"}]}, "auto", EmptyLanguageError),
        ({"$ref": "#/nowhere"}, "auto", InvalidGuideError),
        ({"type": "string", "pattern": "^(?:a|b)$", "maxLength": 0}, "auto", EmptyLanguageError),
        ({"minimum": 1}, "outlines", UnsupportedGuideError),
    ],
)
def test_errors_are_named(schema, backend, error):
    with pytest.raises(error) as info:
        plan(schema, backend)
    assert info.value.param == "schema"


class Refusing(Backend):
    """Serves a script, but refuses schemas with any of some words in them."""

    name = "llguidance"

    def __init__(self, *words, error=UnsupportedGuideError):
        self._words = words
        self._error = error
        self.asked = []

    def compile(self, guide):
        self.asked.append(guide.text)
        for word in self._words:
            if word in guide.text:
                raise self._error(guide.param, f"no {word}")
        return ScriptedBackend(Script.of([{97}])).compile(guide)


def test_weaker_forms_are_offered_until_one_is_served():
    engine = Refusing("uniqueItems", "oneOf")
    schema = {"uniqueItems": True, "oneOf": [{"minItems": 1}, {"title": "x", "type": "string"}]}
    made, _ = Planner(tokenizer_info(), {"llguidance": engine}).plan(
        Guide.json_schema(schema), "llguidance"
    )
    assert {"uniqueItems", "oneOf"} <= set(json.loads(made.gate)[UNENFORCED])
    assert engine.asked[-1] == made.guide.text
    assert len(engine.asked) == len(set(engine.asked))


def test_the_first_reason_is_given_if_none_is_served():
    engine = Refusing("")
    with pytest.raises(UnsupportedGuideError, match="no "):
        Planner(tokenizer_info(), {"llguidance": engine}).plan(
            Guide.json_schema({"uniqueItems": True}), "llguidance"
        )
    assert 2 <= len(engine.asked) <= 20


def test_the_next_engine_is_asked():
    other = Refusing()
    engines = {"llguidance": Refusing(""), "xgrammar": other}
    made, _ = Planner(tokenizer_info(), engines).plan(Guide.json_schema({}), "auto")
    assert made.backend == "xgrammar"
    assert other.asked


def test_an_empty_language_is_no_reason_to_ask_the_next_one():
    other = Refusing()
    engines = {"llguidance": Refusing("", error=EmptyLanguageError), "xgrammar": other}
    with pytest.raises(EmptyLanguageError):
        Planner(tokenizer_info(), engines).plan(Guide.json_schema({}), "auto")
    assert not other.asked


def test_schemas_that_grow_over_the_limits_are_too_complex(monkeypatch):
    monkeypatch.setattr("grammar_host.guide.MAX_TEXT_CHARACTERS", 40)
    with pytest.raises(GrammarTooComplexError, match="rewritten"):
        Planner(tokenizer_info(), {"llguidance": Refusing()}).plan(
            Guide.json_schema({"type": "null"}), "llguidance"
        )


class Failing(ScriptedMatcher):
    """Fails in the middle of the first string."""

    def fill_next_token_bitmask(self, bitmask, index):
        super().fill_next_token_bitmask(bitmask, index)
        if self._position == 2:
            raise GrammarError("schema: the engine gave up")


def test_an_engine_that_fails_on_the_first_tokens_is_not_chosen():
    class Brittle(Refusing):
        def compile(self, guide):
            script = Script.of([{34}, {97}, {98}, {99}])
            return CompiledGuide(lambda stops: Failing(script, stops), 1)

    engines = {"llguidance": Brittle(), "xgrammar": Refusing()}
    made, _ = Planner(tokenizer_info(), engines).plan(Guide.json_schema({}), "auto")
    assert made.backend == "xgrammar"


def test_an_engine_that_offers_no_first_token_is_not_chosen():
    empty = np.zeros(0)

    class Silent(Refusing):
        def compile(self, guide):
            assert not empty.size
            return ScriptedBackend(Script.of([{97}], dead_end_at=0)).compile(guide)

    with pytest.raises(EmptyLanguageError):
        Planner(tokenizer_info(), {"llguidance": Silent()}).plan(Guide.json_schema({}), "auto")


def test_slow_engines_are_loaded_before_they_are_tried():
    trial = Trial(tokenizer_info())
    assert trial(Guide.json_schema({}), "auto") == plan({})
    with pytest.raises(EngineNotLoaded) as info:
        trial(Guide.json_schema({}), "xgrammar")
    assert info.value.engine == "xgrammar"
    trial.preload("xgrammar")
    assert trial(Guide.json_schema({}), "xgrammar").backend == "xgrammar"


def test_a_plan_without_a_gate_is_exact():
    assert Plan("llguidance", Guide.json()).exact
    assert not Plan("llguidance", Guide.json(), gate="{}").exact
    assert not Plan("llguidance", Guide.json(), tags=(("<a>", "{}"),)).exact
