"""The gate over an engine that allows any JSON, with tokens that do several things at once."""

import functools
import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import GrammarMatcher, Guide, GuideError, TokenizerInfo
from grammar_host.backends.llguidance import LLGuidanceBackend
from grammar_host.gate import Closers, with_gate
from grammar_host.gate.cursor import MAX_NESTING
from grammar_host.schema import read_schema
from grammar_host.schema.reading import UNENFORCED
from tests.grammar_host.common import legal, mask
from tests.grammar_host.schema.generators import ADDRESSES, VALIDATORS, Generator

STOP = 256
PIECES = (
    *["{}", "[]", '""', '"a"', '"a":', '"b":', '"}', '"}]', '"}]}', "}]", "}}", "]]", "]}", '{"'],
    *[
        '["',
        '":',
        '":"',
        '": "',
        '","',
        '"],"',
        '"},',
        "},",
        "],",
        "}},",
        '"],',
        '"},{"',
        "1,",
        "2]",
    ],
    *["1}", ", ", "  ", "\n ", "null", "true", "false", "[[", '{"a":', 'a"', 'b"', "ab", '\\"'],
    *["\\u00", "\\\\", '"b"', "[1", "1.5", "e9", "-1", '"a","b"', ':1,"', '}, "', '"a":1,', ":[]"],
    *[":{}", '"é"', "é", '",'],
)
VOCABULARY = [bytes([byte]) for byte in range(256)] + [b""] + [text.encode() for text in PIECES]
SIZE = len(VOCABULARY)
KEYWORDS = (
    *["required", "format", "oneOf", "not", "uniqueItems", "properties", "enum", "const", "type"],
    *["anyOf", "additionalProperties", "minimum", "pattern", "if", "propertyNames", "contains"],
)


@functools.cache
def engine():
    info = TokenizerInfo.from_vocabulary(VOCABULARY, [STOP])
    guide = Guide.json_schema(True, max_whitespace="free")
    return info, Closers(info), LLGuidanceBackend(info).compile(guide).new_matcher


def gated(schema, stops=(STOP,), unenforced=None):
    info, closers, any_json = engine()
    document = read_schema(schema).document
    if unenforced is not None:
        document = {**document, UNENFORCED: unenforced}
    new_matcher = with_gate(any_json, document, info, closers)
    return GrammarMatcher(new_matcher(frozenset(stops)), SIZE, stops)


def split(random, text):
    """The text as a random sequence of tokens."""
    tokens = []
    while text:
        fitting = [i for i, token in enumerate(VOCABULARY) if token and text.startswith(token)]
        longest = max(fitting, key=lambda token: len(VOCABULARY[token]))
        tokens.append(random.choice(fitting) if random.random() < 0.7 else longest)
        text = text[len(VOCABULARY[tokens[-1]]) :]
    return tokens


def written(random, value):
    """JSON with random blanks and escapes."""

    def blank():
        return random.choice(["", "", " ", "\n  "])

    def string(text):
        return "".join(
            json.dumps(c)[1:-1] if c in '"\\' or random.random() < 0.9 else f"\\u{ord(c):04x}"
            for c in text
        )

    if isinstance(value, dict):
        members = (
            f'{blank()}"{string(k)}"{blank()}:{written(random, v)}' for k, v in value.items()
        )
        return "{" + ",".join(members) + blank() + "}"
    if isinstance(value, list):
        return "[" + ",".join(blank() + written(random, v) + blank() for v in value) + "]"
    return f'"{string(value)}"' if isinstance(value, str) else json.dumps(value)


def closed_objects(generator, depth):
    """Objects within arrays within objects that have few names, each once."""
    random = generator.random
    if depth == 0 or random.random() < 0.2:
        leaves = [
            {},
            {"type": "string"},
            {"uniqueItems": True},
            {"minimum": 1},
            {"enum": ["a", "b"]},
        ]
        return random.choice(leaves)
    if random.random() < 0.25:
        return {"type": "array", "items": closed_objects(generator, depth - 1)}
    names = random.sample(generator.names, random.randint(0, 3))
    rest = closed_objects(generator, depth - 1)
    return {
        "properties": {name: closed_objects(generator, depth - 1) for name in names},
        "additionalProperties": False if random.random() < 0.8 else rest,
        "required": ["a"] if random.random() < 0.5 else ["b", "a"],
    }


def case(seed, draft):
    """A readable schema, and documents."""
    generator = Generator(seed, draft)
    schema = generator.root()
    if generator.random.random() < 0.4:
        schema = {"$schema": ADDRESSES[draft], **closed_objects(generator, 3)}
    try:
        read_schema(schema)
    except GuideError:
        return None, []
    return schema, generator.documents(schema, 4)


@pytest.mark.parametrize("draft", sorted(VALIDATORS))
@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 2**32))
def test_a_document_is_accepted_exactly_if_it_is_valid(draft, seed):
    random = Random(seed)
    schema, documents = case(seed, draft)
    unenforced = None if random.random() < 0.5 else random.sample(KEYWORDS, 3)
    for document in documents:
        text = written(random, document)
        tokens = split(random, text.encode())
        stops = {STOP} if random.random() < 0.7 else {STOP, random.randrange(STOP + 1, SIZE)}
        stops = stops if stops.isdisjoint(tokens) else {STOP}
        matcher = gated(schema, stops, unenforced)
        accepted = all(map(matcher.accept_token, [*tokens, STOP]))
        assert accepted == VALIDATORS[draft](schema).is_valid(document), (schema, text, tokens)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), draft=st.sampled_from(sorted(VALIDATORS)))
def test_a_token_is_accepted_exactly_if_its_bit_is_set(seed, draft):
    random = Random(seed)
    schema, documents = case(seed, draft)
    unenforced = None if random.random() < 0.4 else random.sample(KEYWORDS, random.randint(0, 3))
    for document in list(documents)[:1]:
        matcher = gated(schema, (STOP, SIZE - 1), unenforced)
        for token in [*split(random, written(random, document).encode()), STOP]:
            before = mask(matcher)
            fork = matcher.fork()
            accepted = [t for t in range(SIZE) if matcher.validate_tokens([t])]
            assert accepted == legal(matcher), (schema, bytes(matcher._engine._text))
            assert (mask(matcher) == before).all()
            if not matcher.accept_token(token):
                break
            assert (mask(fork) == before).all()
            assert fork.validate_tokens([token]) == 1
            if matcher.is_terminated():
                break
        matcher.rollback(matcher.num_accepted)
        assert (mask(matcher) == mask(gated(schema, (STOP, SIZE - 1), unenforced))).all()


def accept(matcher, text):
    tokens = list(text.encode())
    return matcher.validate_tokens(tokens) == len(tokens) and all(map(matcher.accept_token, tokens))


def test_nesting_has_a_limit_in_any_split():
    deepest = "[" * MAX_NESTING
    matcher = gated({"uniqueItems": True})
    assert accept(matcher, deepest)
    assert not matcher.accept_token(ord("["))
    assert not {ord("["), VOCABULARY.index(b'{"'), VOCABULARY.index(b"[[")} & set(legal(matcher))
    assert accept(matcher, "]" * MAX_NESTING)
    assert matcher.accept_token(STOP)
    matcher.rollback(MAX_NESTING + 2)
    assert VOCABULARY.index(b"[[") not in legal(matcher)
    assert ord("[") in legal(matcher)
    assert accept(gated({}), deepest)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "[1e400]", '{"a": 1e999}', "1" * 5000])
@pytest.mark.parametrize("schema", [{"not": {"const": 0}}, {"$comment": "says nothing"}])
def test_numbers_that_readers_cannot_hold_complete_nothing(number, schema):
    matcher = gated(schema)
    accept(matcher, number)
    assert STOP not in legal(matcher)
    assert not matcher.accept_token(STOP)


@pytest.mark.parametrize(
    ("schema", "prefix", "refused", "allowed"),
    [
        # A part is refused at the token that finishes it, whatever else the token does.
        ({"items": {"format": "ipv4"}}, '["1.2.3', ['"', '"],', '","'], ["."]),
        ({"items": {"minimum": 5}}, "[1", [",", "]", " ", ", "], ["2", "2]"]),
        ({"items": {"const": None}}, "[", ["1,", "[]", '""', "{}"], ["null"]),
        # Sets have no item twice.
        ({"uniqueItems": True}, '["a","', ['a"'], ['b"']),
        ({"uniqueItems": True}, "[1,1", [",", "]", " "], ["1.5", "1"]),
        ({"uniqueItems": True}, "[{},{", ["}", "}]", "},"], ['"a":']),
        ({"uniqueItems": True}, '["a",', ['"a"', '"a":'], ['"b"']),
        # Names of properties.
        ({"propertyNames": {"maxLength": 1}}, '{"ab', ['"', '":'], []),
        ({"propertyNames": {"pattern": "^b"}}, "{", ['"a"', '"a":', '{"'], ['"b":']),
        ({"not": {"required": ["a"]}}, '{"a":1', ["}", "}]"], [","]),
        # No key twice, none that must not come, and no comma if there is none left.
        ({"not": {"type": "null"}}, '{"a":1,"', ['a"'], ['b"', "ab"]),
        ({"properties": {"ab": {}}, "additionalProperties": False}, "{", ['"a"', '"b":'], ['"']),
        ({"properties": {"ab": {}}, "additionalProperties": False}, '{"', ['a"', "b"], ["a", "ab"]),
        (
            {"properties": {"ab": {}}, "additionalProperties": False},
            '{"ab":"',
            ['",', '","'],
            ['"}'],
        ),
        ({"properties": {"a": {}}, "additionalProperties": False}, '{"a":[', ["],"], ["2]", "1,"]),
        (
            {"properties": {"a": {"properties": {}}}, "additionalProperties": False},
            '{"a":{"b":"',
            ['"},', '"},{"'],
            ['"}', '",'],
        ),
    ],
)
def test_what_would_spoil_a_part_is_refused_in_every_token(schema, prefix, refused, allowed):
    matcher = gated(schema)
    assert accept(matcher, prefix)
    bits = legal(matcher)
    for text in refused:
        token = VOCABULARY.index(text.encode())
        assert token not in bits, text
        assert not matcher.accept_token(token), text
    for text in allowed:
        token = VOCABULARY.index(text.encode())
        assert token in bits, text
        assert matcher.validate_tokens([token]) == 1, text


def test_forced_bytes_never_lead_into_a_refusal():
    info, closers, _ = engine()
    guide = Guide.json_schema({"const": ["a", "a"]}, max_whitespace=0)
    forcing = LLGuidanceBackend(info).compile(guide).new_matcher
    for schema, forced in (({}, b'["a","a"]'), ({"uniqueItems": True}, b"")):
        document = read_schema(schema).document
        matcher = with_gate(forcing, document, info, closers)(frozenset({STOP}))
        assert matcher.forced_bytes() == forced
