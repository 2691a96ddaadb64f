"""An answer as it comes, its reasoning apart from what follows."""

import dataclasses
from collections.abc import Iterable, Sequence

from gkv_jax.request import TokenLogprobs
from gkv_jax.serve.chats import Reading
from gkv_jax.serve.reasoning import ReasoningReader, ReasoningTokens


@dataclasses.dataclass(frozen=True)
class Part:
    """What is certain after a piece of an answer.

    Attributes:
      reasoning: more of the reasoning; an empty text, once, if all of it is empty, and None if there is none.
      text: more of what follows it.
      logprobs: of the tokens that write this text.
    """

    reasoning: str | None
    text: str
    logprobs: tuple[TokenLogprobs, ...]


class AnswerParts:
    """Reads one answer, piece by piece or at once, which makes no difference."""

    def __init__(self, reading: Reading) -> None:
        self._reader: ReasoningReader | None = None
        if reading.tags is not None and reading.phase != "none":
            self._reader = ReasoningReader(
                reading.tags, reading.phase, keeps_blanks=reading.keeps_blanks
            )
            self._tokens = ReasoningTokens(
                reading.tags, reading.phase, reading.tokenizer, keeps_blanks=reading.keeps_blanks
            )
        self._held: list[TokenLogprobs] = []
        self._is_told = False  # the first of them
        self._has_thought = False  # which was told

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning, its tags included; certain at the end."""
        if self._reader is None or self._reader.is_plain:
            return 0
        return self._tokens.count

    @property
    def has_answer(self) -> bool:
        """Whether the reasoning, if there is any, came to its end."""
        return self._reader is None or self._reader.ended

    def push(
        self, text: str, tokens: Iterable[int] = (), logprobs: Sequence[TokenLogprobs] = ()
    ) -> Part:
        """The next piece: ``text`` is final, ``tokens`` may be ahead of it."""
        if self._reader is None:
            return Part(None, text, tuple(logprobs))
        self._held += logprobs
        for token in tokens:
            self._tokens.push(token)
        return self._part(self._reader, *self._reader.push(text))

    def finish(self) -> Part:
        """The rest, once nothing more will come."""
        if self._reader is None:
            return Part(None, "", ())
        self._tokens.finish()
        return self._part(self._reader, *self._reader.finish(), is_last=True)

    def _part(
        self, reader: ReasoningReader, reasoning: str, text: str, *, is_last: bool = False
    ) -> Part:
        thought = reasoning or None
        if reader.found and not self._has_thought and (reasoning or reader.ended or is_last):
            thought, self._has_thought = reasoning, True
        logprobs: tuple[TokenLogprobs, ...] = ()
        # A text may come from the end of the tokens alone, which do not know it to be plain then.
        if reader.ended and (self._is_told or reader.is_plain or self._tokens.is_certain):
            before = 0 if self._is_told or reader.is_plain else self._tokens.before
            logprobs = tuple(self._held[before:])
            self._held, self._is_told = [], True
        return Part(thought, text, logprobs)
