"""The vocabulary as bytes: what each token id writes, and which ids stop the generation."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

from grammar_host.errors import TokenizerError
from grammar_host.forced import Encode, Segmenter

_SAMPLE_TEXTS = (
    'A list: {"name": "value", "n": [1, -2.5e3]}',
    " two  spaces, ",
    "   three in front, 1234567890 3.14159",
    "\ttab\nnewline\n\n",
    "CRLF\r\n\r\nlines",
    "é",
    "déjà vu, naïve",
    "Ünïcödé",
    "combining e\u0301 n\u0303",
    "emoji 😀",
    "joined 👩\u200d👩\u200d👧 👍🏽",
    "日本語 中文 한국어",
)
"""Texts whose tokens must give their bytes back. The first is plain ASCII: every tokenizer that
can write JSON at all must pass it."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, eq=False)
class TokenizerInfo:
    """The bytes of every token id and the tokens that end a generation.

    Can be pickled, without `encode`: a process that only compiles grammars needs no tokenizer.

    Attributes:
        vocabulary: V entries, `vocabulary[id]` the bytes that token writes. Empty for special
            tokens, stop tokens and ids that the tokenizer does not have: a grammar can never
            write those as text.
        stop_token_ids: the tokens that end a generation, ascending.
        special_tokens: id → name (`"<|im_end|>"`) of the special tokens below V. A grammar may
            refer to them by name or id; engines give bytes only to those that it names.
        encode: text → token ids without added special tokens, for `GrammarMatcher.forced_tokens`;
            None takes the longest token that fits, from left to right. No part of the
            `fingerprint`.
    """

    vocabulary: tuple[bytes, ...] = field(repr=False)
    stop_token_ids: tuple[int, ...]
    special_tokens: Mapping[int, str] = field(repr=False)
    encode: Encode | None = field(default=None, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        restore = partial(type(self).from_vocabulary, special_tokens=dict(self.special_tokens))
        return restore, (self.vocabulary, self.stop_token_ids)

    @property
    def vocab_size(self) -> int:
        """V, the width of the model's logits."""
        return len(self.vocabulary)

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal digest, equal exactly for equal contents, in every process."""
        digest = hashlib.blake2b(digest_size=16)
        for token in self.vocabulary:
            digest.update(len(token).to_bytes(4, "little") + token)
        digest.update(repr((self.stop_token_ids, sorted(self.special_tokens.items()))).encode())
        return digest.hexdigest()

    @cached_property
    def segmenter(self) -> Segmenter:
        """Segments forced texts; made on first use (tens of milliseconds)."""
        return Segmenter(self.vocabulary, self.special_tokens, self.encode)

    @classmethod
    def from_vocabulary(
        cls,
        vocabulary: Sequence[bytes],
        stop_token_ids: Iterable[int],
        *,
        special_tokens: Mapping[int, str] = MappingProxyType({}),
        encode: Encode | None = None,
    ) -> TokenizerInfo:
        """Builds the info from explicit bytes.

        Args:
            vocabulary: V entries. Bytes of stop and special tokens are dropped.
            stop_token_ids: at least one id below V.
            special_tokens: id → name of further special tokens; ids at or above V are dropped.
            encode: the tokenizer, see the attribute.

        Raises:
            TokenizerError: no stop token, or one outside of the vocabulary.
        """
        vocab_size = len(vocabulary)
        stops = tuple(sorted({int(token) for token in stop_token_ids}))
        if not stops:
            raise TokenizerError("no stop token: pass stop_token_ids, or a guide could never end")
        if stops[0] < 0 or stops[-1] >= vocab_size:
            raise TokenizerError(f"stop tokens {stops} are not all within 0..{vocab_size - 1}")
        names = {token: name for token, name in special_tokens.items() if 0 <= token < vocab_size}
        tokens = list(vocabulary)
        for token in (*stops, *names):
            tokens[token] = b""
        return cls(tuple(tokens), stops, MappingProxyType(names), encode)

    @classmethod
    def from_transformers(
        cls, tokenizer: Any, vocab_size: int, stop_token_ids: Iterable[int] | None = None
    ) -> TokenizerInfo:
        """Builds the info from a `transformers` tokenizer and proves that the bytes are right.

        The tokens of sample texts (spaces, newlines, accents, emoji) must give the texts' bytes
        back; a vocabulary read in the wrong encoding would silently forbid, say, every token that
        starts with a space.

        Args:
            tokenizer: a `PreTrainedTokenizerBase`; byte-level, sentencepiece style, plain characters,
                or tiktoken ranks behind a tokenizer of the model's own.
            vocab_size: V, the width of the model's *logits*: never `len(tokenizer)`, which may be
                smaller (padded heads) or larger (added tokens that the model cannot write).
                Tokens at or above V are dropped.
            stop_token_ids: stop tokens in addition to the tokenizer's own, for example those of
                the generation config.

        Raises:
            TokenizerError: the bytes of the vocabulary cannot be established, as with tokenizers
                that lose blanks or letter case (WordPiece), or no stop token.
        """
        _require_width(vocab_size)
        names = _special_tokens(tokenizer)
        literal = {
            token: added.content.encode()
            for token, added in tokenizer.added_tokens_decoder.items()
            if token not in names
        }
        encoded = tokenizer.get_vocab()

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        mismatches = []
        pieces = {token: i for token, i in encoded.items() if i not in names and i not in literal}
        for encoding in _plausible_encodings(pieces):
            vocabulary = _decode_vocabulary(encoded, vocab_size, encoding)
            for token, content in literal.items():
                if token < vocab_size:
                    vocabulary[token] = content
            mismatch = _lost_bytes(encoded, encoding) or _first_mismatch(
                encode, vocabulary, tokenizer.unk_token_id
            )
            if mismatch is None:
                break
            mismatches.append(f"{encoding}: {mismatch}")
        else:
            raise TokenizerError(
                "the tokenizer's tokens do not give the bytes of the text back "
                f"({'; '.join(mismatches)}); build TokenizerInfo.from_vocabulary instead"
            )
        stops = {*_eos_token_ids(tokenizer), *(() if stop_token_ids is None else stop_token_ids)}
        return cls.from_vocabulary(
            vocabulary,
            # The tokenizer may know stop tokens that this model has no logit for.
            [token for token in stops if token < vocab_size],
            special_tokens=names,
            encode=encode,
        )

    @classmethod
    def from_tiktoken(
        cls, encoding: Any, vocab_size: int, stop_token_ids: Iterable[int] = ()
    ) -> TokenizerInfo:
        """Builds the info from a `tiktoken` encoding, with the same proof.

        Args:
            encoding: a `tiktoken.Encoding`.
            vocab_size: V, as for `from_transformers`.
            stop_token_ids: stop tokens in addition to the encoding's `<|endoftext|>`.

        Raises:
            TokenizerError: ordinary text needs tokens at or above V, or no stop token.
        """
        _require_width(vocab_size)
        names = {encoding.encode_single_token(name): name for name in encoding.special_tokens_set}
        vocabulary = [b""] * vocab_size
        for token in range(min(vocab_size, encoding.n_vocab)):
            try:
                vocabulary[token] = encoding.decode_single_token_bytes(token)
            except KeyError:  # the ids may have gaps
                continue
        mismatch = _first_mismatch(encoding.encode_ordinary, vocabulary, None)
        if mismatch is not None:
            raise TokenizerError(
                f"the encoding's tokens do not give the bytes of the text back ({mismatch})"
            )
        stops = {token for token, name in names.items() if name == "<|endoftext|>"}
        return cls.from_vocabulary(
            vocabulary,
            [token for token in {*stops, *stop_token_ids} if token < vocab_size],
            special_tokens=names,
            encode=encoding.encode_ordinary,
        )


def _require_width(vocab_size: int) -> None:
    if vocab_size < 1:
        raise TokenizerError(f"vocab_size is the width of the logits, not {vocab_size}")


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    names = {
        token: added.content
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special
    }
    for token, name in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True):
        names.setdefault(token, str(name))
    return names


def _eos_token_ids(tokenizer: Any) -> tuple[int, ...]:
    eos = tokenizer.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (eos,)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 as is, the rest from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(rest)})
    return alphabet


_BYTE_LEVEL_ALPHABET = _byte_level_alphabet()
_BYTE_LEVEL_SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"


def _decode_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def _decode_sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    return token.replace(_BLANK, " ").encode("utf-8", "replace")


def _decode_raw(token: str | bytes) -> bytes:
    return token if isinstance(token, bytes) else token.encode("utf-8", "replace")


def _decode_latin_1(token: str) -> bytes:
    try:
        return token.encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8", "replace")


_ENCODINGS = {
    "byte-level": _decode_byte_level,
    "byte-fallback": _decode_sentencepiece,
    "raw": _decode_raw,
    "latin-1": _decode_latin_1,
}
"""How vocabularies spell bytes: GPT-2's alphabet; sentencepiece's "▁" and `<0xNN>`; plain text or
bytes; one character of Latin-1 for each byte."""


def _plausible_encodings(pieces: Mapping[Any, int]) -> list[str]:
    """The encodings that leave their mark on a vocabulary, most specific first.

    Without its mark an encoding must not be tried: in plain text "é" also looks like the byte E9.
    """
    characters = {character for piece in pieces if isinstance(piece, str) for character in piece}
    encodings = ["raw"]
    if _BLANK in characters or any(_BYTE_TOKEN.match(piece) for piece in map(str, pieces)):
        encodings.insert(0, "byte-fallback")
    if _BYTE_LEVEL_SPACE in characters:
        encodings.insert(0, "byte-level")
    if any("\x80" <= character <= "\xff" for character in characters):
        encodings.append("latin-1")
    return encodings


def _decode_vocabulary(
    vocabulary: Mapping[Any, int], vocab_size: int, encoding: str
) -> list[bytes]:
    decode: Any = _ENCODINGS[encoding]
    tokens = [b""] * vocab_size
    for token, index in vocabulary.items():
        if index < vocab_size and (isinstance(token, str) or encoding == "raw"):
            tokens[index] = decode(token)
    return tokens


def _lost_bytes(vocabulary: Mapping[Any, int], encoding: str) -> str | None:
    """Says so if a vocabulary with byte tokens does not have all of them."""
    if encoding != "byte-fallback":
        return None
    matches = [_BYTE_TOKEN.fullmatch(piece) for piece in map(str, vocabulary)]
    missing = sorted(set(range(256)) - {int(match[1], 16) for match in matches if match})
    # A few of them are no fallback, but pieces that somebody wanted: "<0x0A>" for line breaks.
    return f"there is no token <0x{missing[0]:02X}>" if 0 < len(missing) < 128 else None


def _first_mismatch(encode: Encode, vocabulary: Sequence[bytes], unknown: int | None) -> str | None:
    """The first text whose tokens do not give its bytes back, in words; None if none.

    Args:
        encode: the tokenizer.
        vocabulary: V entries, as read.
        unknown: the token for what the vocabulary cannot write.
    """
    for number, text in enumerate((*_SAMPLE_TEXTS, _covered_characters(vocabulary))):
        tokens = encode(text)
        # A vocabulary without bytes or full Unicode may not know a text; ASCII it must know.
        if number > 0 and unknown in tokens:
            continue
        outside = [token for token in tokens if token >= len(vocabulary)]
        if outside:
            return f"ordinary text needs token {outside[0]}, the logits have {len(vocabulary)}"
        written = b"".join(vocabulary[token] for token in tokens)
        if not _is_written(text, written):
            return f"{json.dumps(text)} became {written!r}{_what_was_lost(text, written)}"
    return None


def _covered_characters(vocabulary: Sequence[bytes]) -> str:
    """Characters with, together, every byte of UTF-8 that has a token of its own."""
    covered = {token for token in vocabulary if len(token) == 1}
    points = [*range(0x100), *range(0x100, 0x800, 0x40), *range(0x800, 0xD800, 0x1000)]
    points += [0xD7FF, 0xE000, 0xFFFD, *range(0x10000, 0x110000, 0x40000), 0x10FFFD]
    return "".join(c for c in map(chr, points) if all(bytes([b]) in covered for b in c.encode()))


def _is_written(text: str, written: bytes) -> bool:
    # Sentencepiece tokenizers put a blank before the first word and take it off again. Unicode's
    # normal forms are no misreading of the vocabulary either.
    forms = {text.encode(), *(unicodedata.normalize(f, text).encode() for f in ("NFC", "NFKC"))}
    return written in forms or (written[:1] == b" " and written[1:] in forms)


def _what_was_lost(text: str, written: bytes) -> str:
    """Names what a tokenizer for classification, such as WordPiece, does not keep."""
    kept = written.decode("utf-8", "replace").replace("##", "")
    lost = []
    if "".join(kept.split()).casefold() == "".join(text.split()).casefold():
        if "".join(kept.split()) != "".join(text.split()):
            lost.append("letter case")
        if kept.casefold() != text.casefold():
            lost.append("blanks")
    return f": it loses {' and '.join(lost)}" if lost else ""
