"""The vocabulary as bytes: what each token id writes, and which ids stop the generation."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from grammar_host.errors import TokenizerError

_SAMPLE_TEXTS = (
    'A list: {"name": "value", "n": [1, -2.5e3]}',
    " two  spaces, ",
    "\ttab\nnewline\n\n",
    "é",
    "déjà vu, naïve",
    "Ünïcödé",
    "emoji 😀",
    "日本語",
)
"""Texts whose tokens must give their bytes back. The first is plain ASCII: every tokenizer that
can write JSON at all must pass it."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, eq=False)
class TokenizerInfo:
    """The bytes of every token id and the tokens that end a generation.

    Attributes:
        vocabulary: V entries, `vocabulary[id]` the bytes that token writes. Empty for special
            tokens, stop tokens and ids that the tokenizer does not have: a grammar can never
            write those as text.
        stop_token_ids: the tokens that end a generation, ascending.
        special_tokens: id → name (`"<|im_end|>"`) of the special tokens below V. A grammar may
            refer to them by name or id; engines give bytes only to those that it names.
    """

    vocabulary: tuple[bytes, ...] = field(repr=False)
    stop_token_ids: tuple[int, ...]
    special_tokens: Mapping[int, str] = field(repr=False)

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

    @classmethod
    def from_vocabulary(
        cls,
        vocabulary: Sequence[bytes],
        stop_token_ids: Iterable[int],
        *,
        special_tokens: Mapping[int, str] = MappingProxyType({}),
    ) -> TokenizerInfo:
        """Builds the info from explicit bytes.

        Args:
            vocabulary: V entries. Bytes of stop and special tokens are dropped.
            stop_token_ids: at least one id below V.
            special_tokens: id → name of further special tokens; ids at or above V are dropped.

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
        return cls(tuple(tokens), stops, MappingProxyType(names))

    @classmethod
    def from_transformers(
        cls, tokenizer: Any, vocab_size: int, stop_token_ids: Iterable[int] | None = None
    ) -> TokenizerInfo:
        """Builds the info from a `transformers` tokenizer and proves that the bytes are right.

        The tokens of sample texts (spaces, newlines, accents, emoji) must give the texts' bytes
        back; a vocabulary read in the wrong encoding would silently forbid, say, every token that
        starts with a space.

        Args:
            tokenizer: a `PreTrainedTokenizerBase`.
            vocab_size: V, the width of the model's *logits*: never `len(tokenizer)`, which may be
                smaller (padded heads) or larger (added tokens that the model cannot write).
                Tokens at or above V are dropped.
            stop_token_ids: stop tokens in addition to the tokenizer's own, for example those of
                the generation config.

        Raises:
            TokenizerError: the bytes of the vocabulary cannot be established, or no stop token.
        """
        if vocab_size < 1:
            raise TokenizerError(f"vocab_size is the width of the logits, not {vocab_size}")
        names = _special_tokens(tokenizer)
        literal = {
            token: added.content.encode()
            for token, added in tokenizer.added_tokens_decoder.items()
            if token not in names
        }
        encoded = tokenizer.get_vocab()
        mismatches = []
        for encoding in _plausible_encodings(encoded):
            vocabulary = _decode_vocabulary(encoded, vocab_size, encoding)
            for token, content in literal.items():
                if token < vocab_size:
                    vocabulary[token] = content
            mismatch = _first_mismatch(tokenizer, vocabulary)
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
        )


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


def _decode_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def _decode_sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode("utf-8", "replace")


def _decode_raw(token: str | bytes) -> bytes:
    return token if isinstance(token, bytes) else token.encode("utf-8", "replace")


_ENCODINGS = {
    "byte-level": _decode_byte_level,
    "byte-fallback": _decode_sentencepiece,
    "raw": _decode_raw,
}
"""How vocabularies spell bytes: GPT-2's alphabet; sentencepiece's "▁" and `<0xNN>`; plain text."""


def _plausible_encodings(vocabulary: Mapping[Any, int]) -> list[str]:
    """The encodings that leave their mark on a vocabulary, most specific first.

    Without its mark an encoding must not be tried: in plain text "é" also looks like the byte E9.
    """
    tokens = [token for token in vocabulary if isinstance(token, str)]
    encodings = ["raw"]
    if any("\N{LOWER ONE EIGHTH BLOCK}" in token or _BYTE_TOKEN.match(token) for token in tokens):
        encodings.insert(0, "byte-fallback")
    if any(_BYTE_LEVEL_SPACE in token for token in tokens):
        encodings.insert(0, "byte-level")
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


def _first_mismatch(tokenizer: Any, vocabulary: Sequence[bytes]) -> str | None:
    """The first sample text whose tokens do not give its bytes back, in words; None if none."""
    for number, text in enumerate(_SAMPLE_TEXTS):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        # A vocabulary without bytes or full Unicode may not know a text; ASCII it must know.
        if number > 0 and tokenizer.unk_token_id in tokens:
            continue
        outside = [token for token in tokens if token >= len(vocabulary)]
        if outside:
            return f"ordinary text needs token {outside[0]}, the logits have {len(vocabulary)}"
        written = b"".join(vocabulary[token] for token in tokens)
        # Sentencepiece tokenizers put a blank before the first word and take it off again.
        if written not in (text.encode(), b" " + text.encode()):
            return f"{json.dumps(text)} became {written!r}"
    return None
