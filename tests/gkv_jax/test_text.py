"""Text as it comes: whole characters, stop texts across pieces, and nothing lost at the end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gkv_jax.text import TextStream, token_text
from tests.gkv_jax.tiny import STOP, byte_tokenizer

TOKENIZER = byte_tokenizer()


def stream(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """The pieces of a text (one token a byte) with the flushed rest, and whether it stopped."""
    out = TextStream(TOKENIZER, stop)
    pieces = [out.push(token) for token in TOKENIZER.encode(text)]
    return [*pieces, out.flush()], out.stopped


@settings(deadline=None, max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_pieces_add_up_to_the_text(text: str) -> None:
    pieces, _ = stream(text)
    assert "".join(pieces) == text


@settings(deadline=None, max_examples=200)
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_output_ends_before_the_first_stop_text(text: str, stop: list[str]) -> None:
    pieces, stopped = stream(text, tuple(stop))
    # The first stop text to be complete is the first to be seen.
    ends = [text.find(s) + len(s) for s in stop if s in text]
    assert stopped == bool(ends)
    seen = text[: min(ends)] if ends else text
    starts = [seen.find(s) for s in stop if s in seen]
    assert "".join(pieces) == (seen[: min(starts)] if starts else text)


def test_a_replacement_character_of_the_text_itself_survives() -> None:
    assert "".join(stream("ok \ufffd")[0]) == "ok \ufffd"


def test_an_unfinished_character_is_not_dropped_silently() -> None:
    out = TextStream(TOKENIZER)
    assert [out.push(t) for t in TOKENIZER.encode("x🦜")[:3]] == ["x", "", ""]
    assert out.flush() == TOKENIZER.decode(TOKENIZER.encode("🦜")[:2])


@pytest.mark.parametrize("at", [0, 2])
def test_special_tokens_have_no_text(at: int) -> None:
    tokens = TOKENIZER.encode("ab")
    tokens.insert(at, STOP)
    out = TextStream(TOKENIZER)
    assert "".join([*[out.push(t) for t in tokens], out.flush()]) == "ab"


def test_a_token_by_itself_is_what_it_adds_to_a_text() -> None:
    """Also where the decoder takes the space from the first word of a text."""
    words = Tokenizer(models.WordLevel({"\u2581hello": 0, "\u2581world": 1}, unk_token=None))
    words.decoder = decoders.Metaspace()
    assert words.decode([0, 1]) == "hello world"
    assert [token_text(words, token) for token in (0, 1)] == [" hello", " world"]


def test_parts_of_characters_and_special_tokens_by_themselves() -> None:
    first, *_, last = (token_text(TOKENIZER.backend_tokenizer, t) for t in TOKENIZER.encode("x🦜"))
    assert (first, last) == ("x", "\ufffd")
    assert token_text(TOKENIZER.backend_tokenizer, STOP) == "<stop>"


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text("aé🦜", min_size=1, max_size=3), min_size=1, max_size=4), st.booleans())
def test_special_tokens_that_are_marks_write_what_they_are_given(
    texts: list[str], is_cut: bool
) -> None:
    out, expected, told = TextStream(TOKENIZER, marks={STOP: "<|x|>"}), [], ""
    for text in texts:
        tokens = TOKENIZER.encode(text)
        if is_cut and len(tokens) > 1:  # within a character: its beginning is not told twice
            tokens = tokens[:-1]
        told += "".join(out.push(token) for token in [*tokens, STOP, STOP + 1])
        expected.append(TOKENIZER.decode(tokens))
    assert told + out.flush() == "".join(f"{text}<|x|>" for text in expected)


def test_a_stop_text_may_end_with_a_mark() -> None:
    out = TextStream(TOKENIZER, ("b<|x|>",), {STOP: "<|x|>"})
    tokens = [*TOKENIZER.encode("ab"), STOP, *TOKENIZER.encode("c")]
    assert "".join(out.push(token) for token in tokens) + out.flush() == "a"
    assert out.stopped
