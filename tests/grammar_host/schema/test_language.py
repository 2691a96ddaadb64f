"""Reading and rewriting keep the language, closing narrows it, weakening widens it: all drafts."""

import copy

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import EmptyLanguageError
from grammar_host.schema import INEXACT, read_schema, validator_for, versions
from grammar_host.schema.order import restore_property_order
from grammar_host.schema.rewrite import lower_for_llguidance, modernize
from grammar_host.schema.strict import close_objects
from tests.grammar_host.schema.generators import VALIDATORS, Generator, has_whole_float

NEWEST = VALIDATORS[20]
SEEDS = st.integers(0, 2**32)
DRAFTS = sorted(VALIDATORS)


def read(schema):
    """The schema as it is read, or None if nothing satisfies it."""
    try:
        return read_schema(schema)
    except EmptyLanguageError:
        return None


@pytest.mark.parametrize("draft", DRAFTS)
@settings(deadline=None, max_examples=300)
@given(seed=SEEDS)
def test_rewriting_keeps_the_language(draft, seed):
    generator = Generator(seed, draft)
    schema = generator.root()
    before = copy.deepcopy(schema)
    oracle = VALIDATORS[draft](schema)
    documents = list(generator.documents(schema, 10))
    valid = [oracle.is_valid(document) for document in documents]
    schema_read = read(schema)
    assert schema == before
    if schema_read is None:
        assert not any(valid), schema
        return
    modern = modernize(schema_read.document)
    canonical, _ = restore_property_order(schema_read.canonical, schema_read.document)
    newer = modernize(canonical)
    forms = {
        "document": VALIDATORS[draft](schema_read.document),
        "validator": validator_for(schema_read.document),
        "canonical": VALIDATORS[draft](canonical),
        "modern": NEWEST(modern),
        "lowered": NEWEST(lower_for_llguidance(modern)),
        "modern canonical": NEWEST(newer),
        "lowered canonical": NEWEST(lower_for_llguidance(newer)),
    }
    for name, form in forms.items():
        for document, expected in zip(documents, valid, strict=True):
            # In draft 4, 2.0 is no integer.
            if draft > 4 or not has_whole_float(document):
                assert form.is_valid(document) is expected, (name, form.schema, document)


@pytest.mark.parametrize("draft", DRAFTS)
@settings(deadline=None, max_examples=100)
@given(seed=SEEDS)
def test_no_version_excludes_a_valid_document(draft, seed):
    generator = Generator(seed, draft)
    schema = generator.root()
    schema_read = read(schema)
    if schema_read is None:
        return
    oracle = VALIDATORS[draft](schema)
    valid = [d for d in generator.documents(schema, 10) if oracle.is_valid(d)]
    for backend in INEXACT:
        for version in versions(schema_read, backend, compiles=lambda schema: seed % 2 == 0):
            for document in valid:
                if draft > 4 or not has_whole_float(document):
                    assert NEWEST(version.document).is_valid(document), (version, document)


@pytest.mark.parametrize("draft", DRAFTS)
@settings(deadline=None, max_examples=150)
@given(seed=SEEDS)
def test_closing_only_narrows_the_language(draft, seed):
    generator = Generator(seed, draft)
    schema = generator.root()
    schema_read = read(schema)
    if schema_read is None:
        return
    closed = copy.deepcopy(schema_read.document)
    close_objects(closed)
    again = copy.deepcopy(closed)
    close_objects(again)
    oracle, narrower = VALIDATORS[draft](schema), VALIDATORS[draft](closed)
    for document in generator.documents(schema, 12):
        if narrower.is_valid(document):
            assert oracle.is_valid(document), (closed, document)
        assert VALIDATORS[draft](again).is_valid(document) == narrower.is_valid(document)


@pytest.mark.parametrize(
    ("name", "text", "drafts"),
    [
        ("ipv4", "1.2.3.4.5", {4, 6, 7, 19, 20}),
        ("date", "2023-02-29", {4, 6, 7, 19, 20}),
        ("json-pointer", "a", {6, 7, 19, 20}),
        ("uuid", "not one", {19, 20}),
        ("regex", "(", {4, 6, 7, 19, 20}),
        ("color", "no colour", set()),
        ("nonsense", "anything", set()),
    ],
)
@pytest.mark.parametrize("draft", DRAFTS)
def test_formats_are_rules_where_the_draft_defines_them(name, text, drafts, draft):
    schema = {"$schema": VALIDATORS[draft].META_SCHEMA["$schema"], "format": name}
    document = read_schema(schema).document
    assert ("format" in document) is (draft in drafts)
    assert validator_for(document).is_valid(text) is (draft not in drafts)


def test_the_oracle_is_independent():
    assert not issubclass(jsonschema.Draft7Validator, type(validator_for({})))
