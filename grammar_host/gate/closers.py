"""Which tokens can finish a part of a JSON document."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from grammar_host.bitmask import token_row
from grammar_host.gate.cursor import Cursor
from grammar_host.tokenizer import TokenizerInfo

_OPENING = re.compile(rb'\{\s*"')
_KEY = re.compile(rb'[,{]\s*"[^"]')
_BRACKET = re.compile(rb"[}\]]")


def closes_container(text: bytes, *, in_string: bool) -> bool:
    """Whether a token has a closing bracket outside of strings, or may have one."""
    if in_string and b'"' not in text:
        return False
    if b"\\" in text:  # quotes behind it may or may not count
        return _BRACKET.search(text) is not None
    segments = text.split(b'"')[1 if in_string else 0 :: 2]
    return any(_BRACKET.search(segment) for segment in segments)


def begins_key(text: bytes) -> bool:
    """Whether a token opens an object and begins a key in it."""
    return _OPENING.search(text) is not None


class Closers:
    """Rows of the tokens that have to be examined, by the state of a text. Shared by all gates."""

    def __init__(self, tokenizer_info: TokenizerInfo) -> None:
        self._texts = tokenizer_info.vocabulary
        # A token that opens an object and begins a key may begin one that the object may not have.
        opening = self._row(begins_key)
        outside = opening | self._row(
            lambda text: closes_container(text, in_string=False) or text.count(b'"') > 1
        )
        inside = opening | self._row(lambda text: closes_container(text, in_string=True))
        keys = self._row(lambda text: _KEY.search(text) is not None)
        self._quotes = self._row(lambda text: b'"' in text)
        commas = self._row(lambda text: b"," in text)
        commas_behind_quotes = self._row(lambda text: b"," in text.partition(b'"')[2])
        # By whether no key is left: None where any key may follow.
        self._outside = {
            None: outside,
            False: outside | keys,
            True: outside | commas | self._quotes,
        }
        self._inside = {None: inside, False: inside | keys, True: inside | commas_behind_quotes}
        self._beginning = self._rows_by_first_byte()

    def _row(self, holds: Callable[[bytes], bool]) -> NDArray[np.int32]:
        tokens = [token for token, text in enumerate(self._texts) if holds(text)]
        return token_row(tokens, len(self._texts))

    def _rows_by_first_byte(self) -> dict[bytes, NDArray[np.int32]]:
        tokens: dict[bytes, list[int]] = {bytes([byte]): [] for byte in range(256)}
        for token, text in enumerate(self._texts):
            if text:
                tokens[text[:1]].append(token)
        return {first: token_row(ids, len(self._texts)) for first, ids in tokens.items()}

    def row(
        self, cursor: Cursor, *, string_matters: bool, keys_left: int | None
    ) -> NDArray[np.int32]:
        """int32 [W]: the tokens that may finish something here, or begin a key that may not be.

        Args:
            cursor: where the text stands.
            string_matters: whether the end of the string being written is to be examined.
            keys_left: how many keys the innermost object may still get; None for any.
        """
        if cursor.string_start >= 0 and string_matters:
            return self._quotes
        rows = self._outside if cursor.string_start < 0 else self._inside
        return rows[None if keys_left is None else keys_left == 0]

    def beginning_with(self, first: bytes) -> NDArray[np.int32]:
        """int32 [W], read-only: the tokens that begin with a byte."""
        return self._beginning[first]
