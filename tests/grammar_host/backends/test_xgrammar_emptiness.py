"""Emptiness of a grammar, against a definition that is easy to believe."""

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host.backends.xgrammar_emptiness import KNOWN_VERSION, derives_nothing

NAMES = ("root", "a", "b", "c")
SYMBOLS = st.sampled_from([*NAMES, '"x"', "[^a-z]", "[0-9]*"])
ALTERNATIVES = st.lists(st.lists(SYMBOLS, min_size=1, max_size=3), min_size=1, max_size=2)
RULES = st.fixed_dictionaries(dict.fromkeys(NAMES, ALTERNATIVES))


def to_ebnf(rules):
    lines = [f"{n} ::= {' | '.join(' '.join(alt) for alt in alts)}" for n, alts in rules.items()]
    return "\n".join(lines)


def derives_within(rules, name, height):
    """Whether some derivation tree of at most this height exists; the number of rules suffices."""
    return height > 0 and any(
        all(s not in rules or derives_within(rules, s, height - 1) for s in alternative)
        for alternative in rules[name]
    )


@settings(deadline=None, max_examples=200)
@given(rules=RULES)
def test_it_agrees_with_derivations_of_bounded_height(rules):
    grammar = xgrammar.Grammar.from_ebnf(to_ebnf(rules))
    expected = not derives_within(rules, "root", len(rules))
    assert derives_nothing(grammar.serialize_json()) == expected


@pytest.mark.parametrize(
    ("ebnf", "empty"),
    [
        ('root ::= "a" root', True),
        ('root ::= "a" root | ""', False),
        ("root ::= a*\na ::= a", False),
        ("root ::= a+\na ::= a", True),
        ("root ::= a{0,3}\na ::= a", False),
        ("root ::= a{2,3}\na ::= a", True),
        ("root ::= a?\na ::= a", False),
        ("root ::= [^\\u0000-\\U0010ffff]", True),
        ("root ::= [^\\u0000-\\ud7ff\\ue000-\\U0010ffff]", True),
        ("root ::= [^\\u0000-\\u0060\\u0062-\\U0010ffff]", False),
        ("root ::= []", True),
        ("root ::= []*", False),
        ("root ::= Token(5)", False),
        ('root ::= TagDispatch(("a", b))\nb ::= b', False),
        ("root ::= (a | (b (a | c)))\na ::= a\nb ::= c\nc ::= \"x\"", False),
    ],
)  # fmt: skip
def test_known_grammars(ebnf, empty):
    assert derives_nothing(xgrammar.Grammar.from_ebnf(ebnf).serialize_json()) == empty


def test_an_unknown_serialisation_is_left_alone():
    serialized = xgrammar.Grammar.from_ebnf('root ::= "a" root').serialize_json()
    assert KNOWN_VERSION in serialized
    assert not derives_nothing(serialized.replace(KNOWN_VERSION, "v999"))


def test_a_deep_chain_of_rules_is_quick_and_does_not_recurse():
    chain = "\n".join(f'r{i} ::= "x" r{i + 1}' for i in range(20_000))
    for end, empty in (('"y"', False), ("r0", True)):
        ebnf = f"root ::= r0\n{chain}\nr20000 ::= {end}"
        assert derives_nothing(xgrammar.Grammar.from_ebnf(ebnf).serialize_json()) == empty
