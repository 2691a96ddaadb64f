"""What an engine is said to enforce exactly, it does: no gate, every draft."""

import functools
import itertools
import json
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import GrammarMatcher, Guide, GuideError
from grammar_host.plan import Planner
from grammar_host.schema import read_schema, validator_for
from tests.grammar_host.common import STOP, VOCAB_SIZE, accepts, tokenizer_info
from tests.grammar_host.schema.generators import VALIDATORS, Generator, has_whole_float, orders

MAX_ORDERS = 24


@functools.cache
def planner():
    return Planner(tokenizer_info())


def exact(schema, backend):
    """What the engine makes of a schema that it enforces exactly; None if it does not."""
    try:
        plan, compiled = planner().plan(Guide.json_schema(schema, max_whitespace=1), backend)
    except GuideError:
        return None
    return compiled if plan.exact else None


def writes(compiled, text):
    matcher = GrammarMatcher(compiled.new_matcher(frozenset({STOP})), VOCAB_SIZE, {STOP})
    return accepts(matcher, text)


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar", "outlines"])
@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), draft=st.sampled_from(sorted(VALIDATORS)))
def test_an_engine_allows_exactly_the_valid_documents(backend, seed, draft):
    generator = Generator(seed, draft)
    schema = generator.root()
    compiled = exact(schema, backend)
    if compiled is None:
        return
    oracle = VALIDATORS[draft](schema)
    for document in generator.documents(schema, 6):
        ordered = list(itertools.islice(orders(document), MAX_ORDERS))
        texts = [
            json.dumps(value, ensure_ascii=False, separators=separators)
            for value in ordered
            for separators in ((", ", ": "), (",", ":"))
        ]
        allowed = any(writes(compiled, text) for text in texts)
        if not oracle.is_valid(document):
            assert not allowed, document
        elif len(ordered) < MAX_ORDERS and not has_whole_float(document):
            assert allowed, document


@pytest.mark.parametrize(
    ("backend", "least"), [("llguidance", 30), ("xgrammar", 15), ("outlines", 4)]
)
def test_much_is_exact(backend, least):
    schemas = [Generator(seed, draft).root() for seed in range(12) for draft in VALIDATORS]
    assert sum(exact(schema, backend) is not None for schema in schemas) >= least


NUMBERS = st.one_of(
    st.integers(-20, 20),
    st.decimals(-3, 3, places=2).map(float),
    st.sampled_from([2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 10**18, 1e20, 0.001, -0.0]),
)
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


@settings(deadline=None, max_examples=150)
@given(
    kind=st.sampled_from(["integer", "number"]),
    bounds=st.dictionaries(st.sampled_from(BOUNDS), NUMBERS, min_size=1, max_size=2),
    divisor=st.none() | st.sampled_from([1, 2, 3, 7, 0.5, 0.1, 0.25, 0.07, 1.5, 100, 1e-7]),
)
def test_numbers_are_bounded_exactly(kind, bounds, divisor):
    schema = {"type": kind, **bounds} | ({} if divisor is None else {"multipleOf": divisor})
    compiled = exact(schema, "llguidance")
    if compiled is None:
        return
    near = [Decimal(str(bound)) for bound in bounds.values()] + [Decimal(0)]
    steps = ["0", "1", "0.1", "0.01", "0.001", "0.5"]
    values = {bound + sign * Decimal(step) for bound in near for step in steps for sign in (1, -1)}
    for value in values:
        text = format(value, "f")
        if writes(compiled, text):
            assert satisfies(value, schema), text


def satisfies(value, schema):
    """Exact arithmetic, on the decimals that are written."""
    limits = {
        keyword: Decimal(str(limit)) for keyword, limit in schema.items() if keyword != "type"
    }
    return (
        (schema["type"] == "number" or value == value.to_integral_value())
        and value >= limits.get("minimum", value)
        and value <= limits.get("maximum", value)
        and ("exclusiveMinimum" not in limits or value > limits["exclusiveMinimum"])
        and ("exclusiveMaximum" not in limits or value < limits["exclusiveMaximum"])
        and ("multipleOf" not in limits or value % limits["multipleOf"] == 0)
    )


FORMATS = {
    "duration": ["P1Y2M3DT4H5M6S", "P3W", "PT1H", "P1D"],
    "ipv4": ["192.168.0.1", "255.255.255.255"],
    "ipv6": ["::", "1:2:3:4:5:6:7:8", "fe80::1", "::ffff:1.2.3.4"],
    "uri": ["http://a.b/c?d=e#f", "mailto:a@b", "urn:a:b", "http://[::1]:80/%20"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "date": ["2024-02-29", "1999-12-31"],
    "date-time": ["2016-12-31T23:59:60Z", "2024-02-29T12:00:00.5+02:30"],
    "time": ["23:59:60Z", "12:00:00-00:00"],
    "email": ["a.b+c@d-e.f", '"a b"@c.d'],
    "hostname": ["a-b.c1", "xn--ls8h.la"],
}


@settings(deadline=None, max_examples=400)
@given(data=st.data(), name=st.sampled_from(sorted(FORMATS)))
def test_formats_are_exact_where_it_is_said(data, name):
    schema = {"type": "string", "format": name}
    compiled = exact(schema, "llguidance")
    text = data.draw(st.sampled_from(FORMATS[name]))
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(text)))
        removed = data.draw(st.integers(0, 1))
        added = data.draw(st.sampled_from(["", *"0123456789abxyz-:.+@/[]%TZPWMD #?_"]))
        text = text[:place] + added + text[place + removed :]
    if compiled is not None and writes(compiled, json.dumps(text)):
        assert validator_for({**schema, "$schema": _NEWEST}).is_valid(text)


_NEWEST = "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("bound", [2**53 - 1, 2**63 - 1, 0.001])
@pytest.mark.parametrize("divisor", [0.07, 0.1, 1e-7])
def test_a_bound_that_no_float_is_crashes_nothing(bound, divisor):
    schema = {"type": "number", "minimum": bound, "multipleOf": divisor}
    assert read_schema(schema).document
    exact(schema, "llguidance")
