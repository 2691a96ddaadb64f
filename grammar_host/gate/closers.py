"""Which tokens can finish a part of a JSON document."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from grammar_host.bitmask import token_row
from grammar_host.gate.cursor import Cursor
from grammar_host.tokenizer import TokenizerInfo

_STRUCTURE = re.compile(rb'[",}\]]')
_BRACKET = re.compile(rb"[}\]]")


def closes_container(text: bytes, *, in_string: bool) -> bool:
    """Whether a token has a closing bracket outside of strings, or may have one."""
    if in_string and b'"' not in text:
        return False
    if b"\\" in text:  # quotes behind it may or may not count
        return _BRACKET.search(text) is not None
    segments = text.split(b'"')[1 if in_string else 0 :: 2]
    return any(_BRACKET.search(segment) for segment in segments)


class Closers:
    """Rows of the tokens that have to be examined, by the state of a text. Shared by all gates."""

    def __init__(self, tokenizer_info: TokenizerInfo) -> None:
        texts = tokenizer_info.vocabulary
        outside = [
            token
            for token, text in enumerate(texts)
            if closes_container(text, in_string=False) or text.count(b'"') > 1
        ]
        inside = [t for t, text in enumerate(texts) if closes_container(text, in_string=True)]
        quotes = [token for token, text in enumerate(texts) if b'"' in text]
        self._outside = token_row(outside, len(texts))
        self._inside = token_row(inside, len(texts))
        self._quotes = token_row(quotes, len(texts))
        self._structure = token_row(
            [t for t, text in enumerate(texts) if _STRUCTURE.search(text)], len(texts)
        )

    def row(self, cursor: Cursor, *, string_matters: bool, keys_matter: bool) -> NDArray[np.int32]:
        """int32 [W], read-only: the tokens that may finish something here.

        Args:
            cursor: where the text stands.
            string_matters: whether the end of the string being written is to be examined.
            keys_matter: whether it matters that a key begins.
        """
        if keys_matter:
            return self._structure
        if cursor.string_start < 0:
            return self._outside
        return self._quotes if string_matters else self._inside
