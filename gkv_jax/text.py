"""Tokens to text: as they come, with correct UTF-8 and stop texts, and each by itself."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any


class TextStream:
    """Incremental detokenisation of one output.

    Bytes of an unfinished character are held back, and so is text that may turn out to be the
    beginning of a stop text.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), marks: Mapping[int, str] | None = None
    ) -> None:
        """Of an output that is still to come.

        Args:
          tokenizer: a transformers fast tokenizer.
          stop: texts that end the output.
          marks: what special tokens write; those that are not in it write nothing.
        """
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer.backend_tokenizer
        self._new_decoder = functools.partial(DecodeStream, skip_special_tokens=True)
        self._decoder = self._new_decoder()
        self._stop = tuple(stop)
        self._marks = marks or {}
        self._held = ""
        self._undecoded: list[int] = []
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that is final after this token; ``stopped`` says that a stop text was met."""
        if self.stopped:
            return ""
        if token in self._marks:
            text = self._unfinished()
            if text:  # the decoder would write it once more
                self._decoder = self._new_decoder()
            return self._release(text + self._marks[token])
        piece = self._decoder.step(self._tokenizer, token)
        # None is an unfinished character; its tokens are kept for the case that it never ends.
        self._undecoded = [] if piece is not None else [*self._undecoded, token]
        return self._release(piece or "")

    def alone(self, token: int) -> str:
        """``token_text`` of a token."""
        return token_text(self._tokenizer, token)

    def flush(self) -> str:
        """What was held back, once nothing more will come."""
        if self.stopped:
            return ""
        text = self._release(self._unfinished())
        text, self._held = text + self._held, ""
        return text

    def _unfinished(self) -> str:
        """A character that will not be finished any more."""
        text: str = self._tokenizer.decode(self._undecoded, skip_special_tokens=True)
        self._undecoded = []
        return text

    def _release(self, piece: str) -> str:
        """Add decoded text and take out what cannot become part of a stop text any more."""
        self._held += piece
        found = [at for at in (self._held.find(text) for text in self._stop) if at >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        safe = len(self._held) - self._overlap()
        text, self._held = self._held[:safe], self._held[safe:]
        return text

    def _overlap(self) -> int:
        """Length of the longest end of the held text with which a stop text begins."""
        longest = max((len(text) - 1 for text in self._stop), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-size:]) for text in self._stop):
                return size
        return 0


def token_text(tokenizer: Any, token: int) -> str:
    """What a token writes by itself within a text, with U+FFFD for parts of characters.

    Special tokens are written by name. ``tokenizer`` is of the ``tokenizers`` library.
    """

    def decode(*tokens: int) -> str:
        text: str = tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    once, twice = decode(token), decode(token, token)
    # Decoders of the SentencePiece kind take the space from the first word of a text.
    is_whole = twice.startswith(once) and "\ufffd" not in twice
    return twice[len(once) :] if is_whole else once
