"""Messages that can be shown to a caller."""

import pickle

import pytest

from grammar_host import (
    DeadEndError,
    EmptyLanguageError,
    GrammarError,
    GuideError,
    InvalidGuideError,
    RefusedTokenError,
    TokenizerError,
    UnsupportedGuideError,
)
from grammar_host.errors import MAX_REASON_CHARACTERS, clean_reason


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        (
            "[01:15:59] /project/cpp/json_schema_converter.cc:5082: Schema 'false' cannot accept\n",
            "Schema 'false' cannot accept",
        ),
        (
            "[23:59:59] /a/b.cc:7: Check failed: (holds<Grammar>(result)) is false: Bad tag: x\n y",
            "Bad tag: x y",
        ),
        ("Lark error at line 1\n  start: x\n   ^", "Lark error at line 1 start: x ^"),
        ("  ", "the grammar engine gave no reason"),
    ],
)
def test_reasons_are_one_clean_line(raw, clean):
    assert clean_reason(raw) == clean


def test_long_reasons_are_cut():
    assert len(clean_reason("x" * 10_000)) == MAX_REASON_CHARACTERS


def test_one_base_class_and_a_field_for_guides():
    for kind in (InvalidGuideError, UnsupportedGuideError, EmptyLanguageError):
        error = kind("schema", "because")
        assert isinstance(error, GuideError)
        assert (error.param, error.reason, str(error)) == ("schema", "because", "schema: because")
    for kind in (GuideError, DeadEndError, RefusedTokenError, TokenizerError):
        assert issubclass(kind, GrammarError)
    assert issubclass(GrammarError, ValueError)


@pytest.mark.parametrize("error", [InvalidGuideError("regex", "r"), RefusedTokenError(7, "r")])
def test_errors_survive_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))
