"""What is refused before any engine sees it, and the normal form of what is not."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import (
    EmptyLanguageError,
    GrammarError,
    GrammarTooComplexError,
    Guide,
    InvalidGuideError,
)
from grammar_host.guide import DEFAULT_MAX_WHITESPACE, MAX_NESTING, MAX_TEXT_CHARACTERS
from tests.grammar_host.common import GUIDES, compiler, walk


def nested(levels: int):
    value: dict = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


CYCLE: dict = {}
CYCLE["properties"] = CYCLE

REFUSED = [
    ("schema", lambda: Guide.json_schema("{"), "not valid JSON"),
    ("schema", lambda: Guide.json_schema('{"const": NaN}'), "NaN is not JSON"),
    ("schema", lambda: Guide.json_schema({"const": float("inf")}), "cannot be written as JSON"),
    ("schema", lambda: Guide.json_schema({"const": {1, 2}}), "cannot be written as JSON"),
    ("schema", lambda: Guide.json_schema([]), "not list"),
    ("schema", lambda: Guide.json_schema("3"), "not int"),
    ("schema", lambda: Guide.json_schema(None), "not null"),
    ("schema", lambda: Guide.json_schema({"const": "a\0b"}), "NUL"),
    ("schema", lambda: Guide.json_schema('{"properties": {"a\\u0000": {}}}'), "NUL"),
    ("schema", lambda: Guide.json_schema('{"const": "\\ud800"}'), "surrogate"),
    ("schema", lambda: Guide.json_schema(nested(MAX_NESTING + 2)), "nested deeper"),
    ("schema", lambda: Guide.json_schema("[" * 100_000), "nested deeper"),
    ("schema", lambda: Guide.json_schema(CYCLE), "nested deeper"),
    ("schema", lambda: Guide.json_schema({"const": "x" * MAX_TEXT_CHARACTERS}), "characters"),
    ("schema", lambda: Guide.json_schema(" " * (MAX_TEXT_CHARACTERS + 1)), "characters"),
    ("max_whitespace", lambda: Guide.json_schema({}, max_whitespace=-1), "0 to 1000"),
    ("max_whitespace", lambda: Guide.json_schema({}, max_whitespace=True), "0 to 1000"),
    ("max_whitespace", lambda: Guide.json(max_whitespace=10**9), "0 to 1000"),
    ("regex", lambda: Guide.regex(""), "empty"),
    ("regex", lambda: Guide.regex(b"a"), "not bytes"),
    ("regex", lambda: Guide.regex("a\0"), "NUL"),
    ("regex", lambda: Guide.regex("\ud800"), "surrogate"),
    ("regex", lambda: Guide.regex("(" * 65 + ")" * 65), "groups are nested"),
    ("max_whitespace", lambda: Guide("regex", "a", max_whitespace=1), "blanks of JSON"),
    ("max_whitespace", lambda: Guide.json(max_whitespace="all"), "'free'"),
    ("whitespace_pattern", lambda: Guide("regex", "a", whitespace_pattern=" "), "blanks of JSON"),
    ("whitespace_pattern", lambda: Guide.json(whitespace_pattern=""), "1 to 256"),
    ("whitespace_pattern", lambda: Guide.json(whitespace_pattern="\0"), "NUL"),
    ("whitespace_pattern", lambda: Guide("json", "", 1, " "), "excludes max_whitespace"),
    ("strict", lambda: Guide.json_schema({}, strict=1), "true or false"),
    ("strict", lambda: Guide("json", "", 8, strict=True), "closes the objects"),
    ("reasoning_end", lambda: Guide.regex("a").after_reasoning(""), "1 to 256"),
    ("reasoning_end", lambda: Guide.regex("a").after_reasoning("\ud800"), "surrogate"),
    ("reasoning_end", lambda: Guide.regex("a").after_reasoning("x" * 257), "1 to 256"),
    ("grammar", lambda: Guide.grammar(" \n"), "empty"),
    ("grammar", lambda: Guide.grammar("root ::= " + "(" * 65 + '"a"' + ")" * 65), "groups"),
    ("lark", lambda: Guide.lark(None), "not null"),
    ("choice", lambda: Guide.choice([]), "at least one choice"),
    ("choice", lambda: Guide.choice("ab"), "not str"),
    ("choice", lambda: Guide.choice(["a", 1]), "not int"),
    ("choice", lambda: Guide.choice(["a\0"]), "NUL"),
    ("choice", lambda: Guide.choice(None), "not null"),
    ("structural_tag", lambda: Guide.structural_tag("[]"), "not list"),
    ("structural_tag", lambda: Guide.structural_tag(["a"]), "not list"),
    ("structural_tag", lambda: Guide.structural_tag("nope"), "not valid JSON"),
    ("kind", lambda: Guide("yaml", "a"), "none of"),
]


@pytest.mark.parametrize(("field", "build", "reason"), REFUSED)
def test_malformed_guides_are_refused(field, build, reason):
    with pytest.raises((InvalidGuideError, GrammarTooComplexError), match=reason) as info:
        build()
    assert info.value.param == field
    assert info.value.code.startswith(("invalid_", "grammar_too_complex"))
    assert str(info.value).startswith(f"{field}: ")
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("schema", [False, "false", {"not": {}}, {"not": True}])
def test_schemas_that_accept_nothing_at_sight(schema):
    with pytest.raises(EmptyLanguageError) as info:
        Guide.json_schema(schema)
    assert info.value.param == "schema"


def test_schemas_keep_their_key_order_and_equal_ones_are_one_key():
    schema = {"required": ["b"], "properties": {"b": {}, "a": {"const": "é"}}, "type": "object"}
    guide = Guide.json_schema(schema)
    assert list(json.loads(guide.text)) == ["required", "properties", "type"]
    assert list(guide.document["properties"]) == ["b", "a"]
    # Escaped or raw, spaced or not: the same schema.
    for text in (json.dumps(schema), json.dumps(schema, ensure_ascii=False, indent=2)):
        assert Guide.json_schema(text) == guide
        assert hash(Guide.json_schema(text)) == hash(guide)
    reordered = {key: schema[key] for key in ("type", "required", "properties")}
    assert Guide.json_schema(reordered) != guide
    assert Guide.json_schema(schema, max_whitespace=2) != guide
    assert guide.max_whitespace == DEFAULT_MAX_WHITESPACE


def test_pydantic_models_are_schemas():
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel):
        name: str
        friends: list["Person"]

    guide = Guide.json_schema(Person)
    assert guide == Guide.json_schema(Person.model_json_schema())
    assert compiler().compile(guide).backend == "llguidance"


def test_parentheses_that_are_text_do_not_nest():
    many = "(" * 100
    for guide in (
        Guide.regex(f"[{many}]" + r"\(" * 100),
        Guide.grammar(f'root ::= "{many}"'),
        Guide.regex("(a)" * 100),
    ):
        assert compiler().compile(guide).matcher().accept_token(ord("(")) != (
            guide.text.startswith("(a)")
        )
    assert Guide.json_schema(nested(MAX_NESTING)).kind == "json_schema"


def mutate(text: str, seed: int) -> str:
    """Cuts, doubles and shuffles pieces of a valid text: closer to real mistakes than noise."""
    rng = random.Random(seed)
    characters = list(text)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(characters) + 1)
        match rng.randrange(4):
            case 0:
                del characters[at : at + rng.randint(1, 8)]
            case 1:
                characters[at:at] = rng.choices('(){}[]|*+?"\\$^.,:<>é\n0 a', k=rng.randint(1, 5))
            case 2:
                characters[at:at] = characters[at : at + rng.randint(1, 20)]
            case 3:
                rng.shuffle(characters[at : at + 10])
    return "".join(characters)


CONSTRUCTORS = {
    "json_schema": Guide.json_schema,
    "regex": Guide.regex,
    "grammar": Guide.grammar,
    "lark": Guide.lark,
    "structural_tag": Guide.structural_tag,
}


def compile_and_walk(kind: str, text: str) -> None:
    """Compiles a text of any quality; whatever is wrong with it must be one clean message."""
    try:
        matcher = compiler().compile(CONSTRUCTORS[kind](text)).matcher()
    except GrammarError as error:
        message = str(error)
    else:
        message = ""
        walk(matcher, [1, 2, 3])
    assert "\n" not in message
    assert ".cc:" not in message


@pytest.mark.parametrize("kind", CONSTRUCTORS)
@settings(deadline=None, max_examples=40)
@given(noise=st.text(max_size=30) | st.binary(max_size=30).map(lambda b: b.decode("latin-1")))
def test_noise_raises_nothing_but_grammar_errors(kind, noise):
    compile_and_walk(kind, noise)


@pytest.mark.parametrize("guide", [g for g in GUIDES.values() if g.kind in CONSTRUCTORS], ids=str)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_mutations_raise_nothing_but_grammar_errors(guide, seed):
    compile_and_walk(guide.kind, mutate(guide.text, seed))
