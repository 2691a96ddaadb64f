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
      reasoning: more of the reasoning.
      text: more of what follows it.
      logprobs: of the tokens that follow it.
    """

    reasoning: str
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
            self._tokens = ReasoningTokens(reading.tags, reading.phase, reading.tokenizer)
        self._held: list[TokenLogprobs] = []
        self._is_told = False

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning, its tags included; certain at the end."""
        return 0 if self._reader is None else self._tokens.count

    @property
    def has_answer(self) -> bool:
        """Whether the reasoning, if there is any, came to its end."""
        return self._reader is None or self._reader.ended

    def push(
        self, text: str, tokens: Iterable[int] = (), logprobs: Sequence[TokenLogprobs] = ()
    ) -> Part:
        """The next piece: ``text`` is final, ``tokens`` may be ahead of it."""
        if self._reader is None:
            return Part("", text, tuple(logprobs))
        self._held += logprobs
        for token in tokens:
            self._tokens.push(token)
        return self._part(*self._reader.push(text))

    def finish(self) -> Part:
        """The rest, once nothing more will come."""
        if self._reader is None:
            return Part("", "", ())
        self._tokens.finish()
        return self._part(*self._reader.finish())

    def _part(self, reasoning: str, text: str) -> Part:
        told: tuple[TokenLogprobs, ...] = ()
        if self.has_answer:
            told = tuple(self._held if self._is_told else self._held[self.reasoning_tokens :])
            self._held, self._is_told = [], True
        return Part(reasoning, text, told)
