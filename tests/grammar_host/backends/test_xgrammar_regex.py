"""XGrammar reads a regular expression as the other engines do, or refuses it."""

import re

import pytest

from grammar_host import Guide, UnsupportedGuideError
from grammar_host.backends.xgrammar_regex import checked_regex
from tests.grammar_host.common import VOCAB_SIZE, accepts, compiler


@pytest.mark.parametrize(
    "pattern",
    [
        *("a$b", "a^b", "(^a)b", "(a$)", r"\Aa\Z", r"\Qa\E", r"a\z", r"x\G", r"\Ra", "a|(b|^c)"),
        *("[^].]x", "[]a]", "[[:alpha:]]", "[a-z--b]", "[a&&b]", "[a~~b]"),
    ],
)
def test_what_xgrammar_would_misread_is_refused(pattern):
    with pytest.raises(UnsupportedGuideError, match="llguidance") as info:
        compiler(VOCAB_SIZE, "xgrammar").compile(Guide.regex(pattern))
    assert info.value.param == "regex"


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^ab$", ["ab"]),
        ("^a$|^b$", ["a", "b"]),
        ("a.c", ["abc", "a😀c", "a\nc"]),
        (r"a\.c[.$^]", ["a.c.", "a.c$", "abc."]),
        (r"[\d\-]+\n", ["1-2\n", "1"]),
        (r"\$\^x", ["$^x", "x"]),
    ],
)
def test_the_language_is_that_of_other_engines(pattern, texts):
    for text in texts:
        expected = re.fullmatch(pattern, text) is not None
        for backend in ("xgrammar", "llguidance"):
            matcher = compiler(VOCAB_SIZE, backend).compile(Guide.regex(pattern)).matcher()
            assert accepts(matcher, text) is expected, (backend, text)


def test_dots_in_classes_and_behind_backslashes_stay():
    assert checked_regex(r"[.]\..") == r"[.]\.[^\n]"
