"""No string is begun that cannot be ended: XGrammar lets bytes pass that no JSON string has."""

import functools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import GrammarCompiler, GrammarMatcher, Guide, TokenizerInfo
from grammar_host.gate import Closers, with_gate
from grammar_host.gate.effects import is_malformed, writes_malformed
from grammar_host.schema import read_schema, validator_for
from grammar_host.tools import parse_tool_calls
from tests.grammar_host.common import SPECIAL_TOKENS, STOP, accepts, bits, byte_vocabulary, mask

PIECES = [
    b"a\t", b'"\t', b'\t"', b'"\x01', b'a"\n', b'","\t', b'",\n"', b'"}\n', b"\\\t", b'\\"\t',
    b"\xed\xa0", b"\xed\x9f", b"\xa0\x80", b"\x9f\xbf", b"\xe0\x80", b"\xf0\x80", b"\xe0\xa0",
    b'\xa0\x80"', b'\x9f\xbf"}', "a\u0ca0".encode(), b"\x7f",
]  # fmt: skip
"""Tokens with bytes that a string must not have, in it, behind it, and across two tokens."""

LONGEST = 150
CONTENT = st.text(st.characters(exclude_characters='"\\', exclude_categories=["Cc", "Cs"]))
WRONG = st.characters(max_codepoint=0x1F) | st.characters(
    min_codepoint=0xD800, max_codepoint=0xDFFF, categories=["Cs"]
)
LENGTHS = st.builds(
    lambda least, more: (
        {"type": "string"}
        | ({} if least is None else {"minLength": least})
        | ({} if more is None else {"maxLength": (least or 0) + more})
    ),
    st.none() | st.integers(0, 3),
    st.none() | st.integers(0, 6),
)
LEAVES = LENGTHS | st.sampled_from([{"type": "integer"}, {"enum": ["a", "b"]}, {"type": "boolean"}])


def an_object(properties, required, closed):
    schema = {"type": "object", "properties": properties}
    schema["required"] = [name for name in properties if name in required]
    return schema | ({"additionalProperties": False} if closed else {})


OBJECTS = st.recursive(
    LEAVES | LENGTHS.map(lambda item: {"type": "array", "items": item, "maxItems": 3}),
    lambda inner: st.builds(
        an_object,
        st.dictionaries(st.sampled_from("cdé"), inner, min_size=1, max_size=3),
        st.sets(st.sampled_from("cdé")),
        st.booleans(),
    ),
    max_leaves=4,
).filter(lambda schema: schema.get("type") == "object")


@functools.cache
def info():
    vocabulary = byte_vocabulary(300)[:280] + PIECES
    return TokenizerInfo.from_vocabulary(vocabulary, [STOP], special_tokens=SPECIAL_TOKENS)


@functools.cache
def compiler():
    return GrammarCompiler(info(), isolation="none", cache_limit_bytes=0)


def tools(parameters, choice="required"):
    function = {"name": "f", "parameters": parameters}
    return Guide.tools([{"type": "function", "function": function}], choice, parallel=False)


def walk(matcher, seed):
    """Tokens by the dice: those that end something come often, or walks would not end."""
    rng = np.random.default_rng(seed)
    weights = rng.exponential(size=info().vocab_size)
    for token, text in enumerate(info().vocabulary):
        weights[token] *= 8 if text[-1:] in (b'"', b"}", b"]", b"\t") else 1
        # No numbers with exponents, which may be too large for every reader.
        weights[token] *= 1e-12 if text in (b"e", b"E") else 1
    tokens = []
    while not matcher.is_terminated() and len(tokens) < LONGEST:
        legal = bits(mask(matcher))
        assert len(legal), (
            b"".join(info().vocabulary[t] for t in tokens),
            matcher.explain_dead_end(),
        )
        chances = weights[legal] / weights[legal].sum()
        tokens.append(int(rng.choice(legal, p=chances)))
        assert matcher.accept_token(tokens[-1])
    return b"".join(info().vocabulary[token] for token in tokens), matcher.is_terminated()


def is_valid(schema, text):
    return validator_for(read_schema(schema).document).is_valid(json.loads(text))


@settings(deadline=None, max_examples=60)
@given(schema=OBJECTS, seed=st.integers(0, 2**32))
def test_arguments_with_lengths_never_come_to_a_dead_end(schema, seed):
    grammar = compiler().compile(tools(schema))
    text, ended = walk(grammar.matcher(), seed)
    if ended and not grammar.exact:
        (call,) = parse_tool_calls(text.decode())[1]
        assert is_valid(schema, call.arguments)


@settings(deadline=None, max_examples=60)
@given(schema=OBJECTS, seed=st.integers(0, 2**32))
def test_documents_with_lengths_never_come_to_a_dead_end(schema, seed):
    grammar = compiler().compile(Guide.json_schema(schema), "xgrammar")
    text, ended = walk(grammar.matcher(), seed)
    if ended and not grammar.exact:
        assert is_valid(schema, text.decode())


NAMED = {
    "type": "object",
    "properties": {"c": {"type": "string", "maxLength": 8}},
    "required": ["c"],
    "additionalProperties": False,
}


def of_anything(document):
    """The gate alone: the engine allows every text, which only a line feed ends."""
    engine = compiler().compile(Guide.grammar(r'root ::= [^]* "\n"')).compiled
    new_matcher = with_gate(engine.new_matcher, document, info(), Closers(info()))
    return GrammarMatcher(new_matcher(frozenset({STOP})), info().vocab_size, [STOP])


@pytest.mark.parametrize(
    "begun",
    ["", '{"', '{"a', '{"\\', '{"a":', '{"a":"', '{"a":"b', '{"a":"\\', '{"a":"é', '{"c":"d'],
)
@pytest.mark.parametrize("closed", [True, False])
def test_masks_say_what_is_accepted(begun, closed):
    schema = NAMED if closed else {**NAMED, "additionalProperties": True}
    guide = Guide.json_schema(schema)
    plan, _ = compiler()._planner.plan(guide, "xgrammar")
    tool = compiler().compile(tools(schema)).matcher()
    for matcher, text in (
        (compiler().compile(guide, "xgrammar").matcher(), begun),
        (tool, f'<tool_call>\n{{"name": "f", "arguments": {begun}'),
        (of_anything(json.loads(plan.gate)), begun),
        (of_anything(read_schema(schema).document), begun),
    ):
        for lead in (b"", b"\xed", b"\xe0", b"\xf0"):
            fork = matcher.fork()
            if all(fork.accept_token(byte) for byte in text.encode() + lead):
                legal = [t for t in range(info().vocab_size) if fork.validate_tokens([t])]
                assert legal == list(bits(mask(fork)))


@pytest.mark.parametrize(
    ("begun", "wrong"), [(b"", 0x09), (b"a", 0x00), (b"a", 0x1F), (b"a\xed", 0xA0), (b"\xed", 0xBF)]
)
def test_the_wrong_byte_is_refused_when_it_comes(begun, wrong):
    matcher = compiler().compile(Guide.json_schema(NAMED), "xgrammar").matcher()
    for byte in b'{"c":"' + begun:
        assert matcher.accept_token(byte)
    assert wrong not in bits(mask(matcher))
    assert not matcher.accept_token(wrong)


def test_where_nothing_else_is_legal_the_error_says_so():
    tokens = [b'{"c":"', b"\t", b""]
    few = TokenizerInfo.from_vocabulary(tokens, [2], special_tokens={2: "<|end|>"})
    grammar = GrammarCompiler(few, isolation="none").compile(Guide.json_schema(NAMED), "xgrammar")
    matcher = grammar.matcher()
    assert matcher.accept_token(0)
    assert not len(bits(mask(matcher)))
    assert "every way to go on would write a control character" in str(matcher.explain_dead_end())


def test_a_single_name_is_as_closed_as_two():
    names = ["c", "d"]
    for count in (1, 2):
        properties = {name: {"type": "string", "minLength": 1} for name in names[:count]}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        grammar = compiler().compile(Guide.json_schema(schema), "xgrammar")
        assert "propertyNames" not in grammar.notes[0]
        used = ",".join(f'"{name}":"x"' for name in properties)
        assert not accepts(grammar.matcher(), "{" + used + ",")


@given(text=CONTENT, split=st.integers(0))
def test_what_a_string_may_have_is_not_malformed(text, split):
    data = text.encode()
    split %= len(data) + 1
    assert not is_malformed(data[:split])
    assert not is_malformed(data, split)
    assert not writes_malformed(
        b"\n" + json.dumps(text, ensure_ascii=False).encode() + b"\t", in_string=False
    )


@given(before=CONTENT, wrong=WRONG, after=CONTENT, split=st.integers(0))
def test_what_no_string_may_have_is_malformed(before, wrong, after, split):
    data = (before + wrong + after).encode(errors="surrogatepass")
    split %= len(data)
    assert is_malformed(data[: split + 1]) or is_malformed(data, split)
    assert writes_malformed(data + b'"', in_string=True)
    assert writes_malformed(b'{"' + data, in_string=False)
    with pytest.raises(ValueError, match=r"control character|can't decode"):
        json.loads((b'"' + data + b'"').decode())
