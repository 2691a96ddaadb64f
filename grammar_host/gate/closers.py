"""Which tokens can finish a part of a JSON document."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from grammar_host.bitmask import token_row
from grammar_host.gate.cursor import Cursor
from grammar_host.tokenizer import TokenizerInfo

_BRACKET = re.compile(rb"[}\]]")


class Closers:
    """Rows of the tokens that have to be examined, by the state of a text. Shared by all gates."""

    def __init__(self, tokenizer_info: TokenizerInfo) -> None:
        quotes, brackets_behind_quotes, outside = [], [], []
        for token, text in enumerate(tokenizer_info.vocabulary):
            if b'"' in text:
                quotes.append(token)
                if _BRACKET.search(text, text.index(b'"')):
                    brackets_behind_quotes.append(token)
            if _BRACKET.search(text) or text.count(b'"') > 1:
                outside.append(token)
        size = tokenizer_info.vocab_size
        self._quotes = token_row(quotes, size)
        self._brackets_behind_quotes = token_row(brackets_behind_quotes, size)
        self._outside = token_row(outside, size)

    def row(self, cursor: Cursor, *, string_matters: bool) -> NDArray[np.int32]:
        """int32 [W], read-only: the tokens that may finish something here.

        Args:
            cursor: where the text stands.
            string_matters: whether the end of the string being written is to be examined.
        """
        if cursor.string_start < 0:
            return self._outside
        return self._quotes if string_matters else self._brackets_behind_quotes
