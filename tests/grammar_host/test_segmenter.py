"""Which tokens of a text are the tokenizer's own, whatever comes behind the text?"""

import itertools
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grammar_host import TokenizerInfo
from grammar_host.forced import Segmenter
from tests.grammar_host import common
from tests.grammar_host.common import STOP
from tests.grammar_host.vocabularies import canonical, tokenizer_info, written


@pytest.mark.parametrize("tokenizer", ["byte-level", "Llama 3", "sentencepiece", "unigram"])
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_text_is_segmented_as_the_tokenizer_does(tokenizer, data):
    """Stable tokens stay, for any cut of any text and any continuation of it."""
    info = tokenizer_info(tokenizer)
    pieces = [piece.decode("utf-8", "ignore") for piece in info.vocabulary if piece]
    pieces += [*"0123456789 \n", "é", "日", "\u3000", "😀"]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=12)))
    tokens = canonical(info, text)
    assume(tokens)
    split = data.draw(st.integers(0, len(tokens)))
    start = len(written(info, tokens[:split]))
    end = data.draw(st.integers(start, len(text.encode())))
    rest = text.encode()[end:]
    others = data.draw(st.binary(max_size=3)) if rest else b""
    stable = info.segmenter.stable_tokens(
        info.segmenter.context(tokens[:split]),
        text.encode()[start:end],
        bytes(sorted({*rest[:1], *others})),
    )
    assert list(stable) == tokens[split : split + len(stable)]


def test_what_may_follow_decides_what_is_left_to_the_model():
    info = TokenizerInfo.from_vocabulary(
        [*(bytes([byte]) for byte in range(256)), b"", b"ab", b"abc", b"bcd", b"cx"], [256]
    )
    stable = info.segmenter.stable_tokens
    assert stable((), b"zab", b"") == (ord("z"), 257)  # the end of the text
    assert stable((), b"zab", b"xy") == (ord("z"), 257)
    assert stable((), b"zab", b"bcy") == (ord("z"),)  # "abc"
    assert stable((), b"zabc", b"d") == (ord("z"),)  # "bcd" begins inside of "abc"
    assert stable((), b"zabc", b"x") == (ord("z"),)  # "cx"
    assert stable((), b"zabc", b"q") == (ord("z"), 258)


def test_blanks_at_the_end_are_left_to_the_model():
    """GPT-2's kind gives the last of several blanks to the word that follows."""
    info = tokenizer_info("byte-level")
    text = "x\n   "
    assert written(info, info.segmenter.stable_tokens((), text.encode(), b"")) == text.encode()
    assert written(info, info.segmenter.stable_tokens((), text.encode(), b"q")) == b"x"
    # Even if no token begins with a blank and what follows: the blanks become other tokens.
    assert not any(token.startswith(b" ~") for token in info.vocabulary)
    blanks = info.encode("x  ")
    assert info.encode("x  ~")[: len(blanks)] != blanks
    assert written(info, info.segmenter.stable_tokens((), b"x  ", b"~")) == b"x"


def test_the_context_is_text_from_where_the_tokenizer_could_begin():
    info = tokenizer_info("byte-level")
    stable = info.segmenter.stable_tokens
    brace, quote, name = (info.encode(text)[0] for text in ("{", '"', "name"))
    assert info.encode('{"name') == [info.encode('{"')[0], name]
    assert stable((brace,), b'"name', b"") == ()
    # A special token separates; special tokens have no bytes.
    assert stable((brace, *info.special_tokens), b'"name', b"") == (quote, name)
    # The context is a window, which may begin inside of a character.
    inside = [info.vocabulary.index(bytes([byte])) for byte in "日".encode()[1:]]
    assert stable((*inside, brace), b'"name', b"") == ()
    assert stable((*inside, quote), b"name", b"") == (name,)
    assert stable(tuple(info.encode('"nam')), b'e": ', b"1") == ()


def test_a_character_that_has_only_begun_may_belong_to_the_last_token():
    stable = tokenizer_info("bytes").segmenter.stable_tokens
    assert "日本".encode()[2:] in tokenizer_info("bytes").vocabulary
    assert stable((), "日".encode() + b"\xe5", b"\x80") == tuple("日".encode())
    assert stable((), "日".encode() + b"\xe6", b"\x80") == tuple("日".encode()[:2])


def test_a_tokenizer_that_changes_the_text_forces_nothing():
    vocabulary = common.byte_vocabulary(300)
    for encode in (
        lambda text: list(text.upper().encode()),  # other letters
        lambda text: [ord("?")] * len(text),  # unknown
        lambda text: [*text.encode(), 4096],  # tokens that the model does not have
    ):
        info = TokenizerInfo.from_vocabulary(vocabulary, [STOP], encode=encode)
        assert info.segmenter.stable_tokens((), b"name", b"") == ()


def test_text_that_is_no_text_forces_nothing():
    stable = tokenizer_info("bytes").segmenter.stable_tokens
    assert stable((), b"a\xff\xfeb", b"") == ()
    assert stable((0xFF, 0x41), b"b", b"") == ()
    assert stable((), b"\xc3", b"") == ()


def test_the_tokenizer_is_asked_once_for_the_same_text():
    calls = Counter()

    def encode(text: str) -> list[int]:
        calls[text] += 1
        return list(text.encode())

    info = TokenizerInfo.from_vocabulary(common.byte_vocabulary(300), [STOP], encode=encode)
    for _ in range(3):
        assert info.segmenter.stable_tokens((ord("{"),), b'"name', b'"') == tuple(b'"name')
    assert calls['{"name'] == 1


def test_the_longest_token_is_taken_where_there_is_no_tokenizer():
    vocabulary = [b"a", b"ab", b"abcd", b"c", b"\x00", b"", b"ab"]
    segmenter = Segmenter(vocabulary, {5: "<end>"})
    assert segmenter.spell_out(b"abcabcd") in ((1, 3, 2), (6, 3, 2))
    assert segmenter.spell_out(b"a\x00zab") == (0, 4)
    assert segmenter.spell_out(b"<end>") == ()
    for text in map("".join, itertools.product("abc", repeat=4)):
        tokens = segmenter.spell_out(text.encode())
        assert text.encode().startswith(b"".join(vocabulary[token] for token in tokens))
