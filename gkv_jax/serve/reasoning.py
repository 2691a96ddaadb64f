"""Models that think before they answer: where the reasoning is, in a prompt, under a guide, in an answer.

Models write it between two tags. Whether an answer begins inside of it, the prompt's end tells: chat
templates open it, close it at once, or leave that to the model.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gkv_jax.serve.protocol.formats import Constraint
from gkv_jax.serve.settings import AUTO, OFF, USUAL_TAGS, read_tags
from gkv_jax.text import TextStream
from grammar_host import Guide

Phase = Literal["none", "possible", "begun"]
"""Whether an answer holds reasoning: it cannot, it does if it begins with the tag, or it begins inside."""

_TAIL = 32
"""Last tokens of a prompt, among which the tag of an opening of an answer is."""

# Only special tokens write these: no text has them.
_START_MARK, _END_MARK = "\ud800", "\ud801"


@dataclasses.dataclass(frozen=True)
class Tags:
    """The tags around a model's reasoning.

    Attributes:
      start: the tag that begins it.
      end: the tag that ends it.
      marks: from special tokens, which write nothing else, to what stands for them in texts.
    """

    start: str
    end: str
    marks: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, setting: str, tokenizer: Any) -> "Tags | None":
        """What a setting says of a tokenizer's model; None if no reasoning is to be told apart.

        Args:
          setting: ``auto``: the usual tags if the chat template mentions one of them; ``off``; or both
            tags, with a blank between them.
          tokenizer: a transformers tokenizer.

        Raises:
          UserError: none of these.
        """
        if setting == OFF:
            return None
        if setting == AUTO:
            template = str(tokenizer.chat_template or "")
            if not any(tag in template for tag in USUAL_TAGS.split()):
                return None
            setting = USUAL_TAGS
        start, end = read_tags(setting)
        marks = {}
        for name, mark in ((start, _START_MARK), (end, _END_MARK)):
            for token, facts in tokenizer.added_tokens_decoder.items():
                if facts.content == name and facts.special:
                    marks[token] = mark
        return cls(start, end, marks)

    @property
    def written(self) -> tuple[str, str]:
        """Both as they stand in texts."""
        marks = set(self.marks.values())
        return (
            _START_MARK if _START_MARK in marks else self.start,
            _END_MARK if _END_MARK in marks else self.end,
        )

    def phase(self, prompt: Sequence[int], tokenizer: Any) -> Phase:
        """What a prompt's end says of the answer."""
        tail = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
        if tail.endswith(self.start):
            return "begun"
        return "none" if tail.endswith(self.end) else "possible"

    def constraint(self, constraint: Constraint, phase: Phase) -> Constraint:
        """A constraint on what follows the reasoning.

        Where the model may leave the reasoning out, what does not begin with the tag is the answer.
        """
        if phase == "none":
            return constraint
        start = self.start if phase == "possible" else None

        def build() -> Guide:
            return constraint.build().after_reasoning(self.end, start=start)

        return dataclasses.replace(constraint, build=build)


class ReasoningReader:
    """Takes the reasoning out of a text that comes in pieces; where it is cut makes no difference.

    Blanks at both ends of the reasoning are left out, and so are those between it and the answer unless the
    answer ``keeps_blanks``. Held back is only what may become a tag, and such blanks.

    Attributes:
      found: whether there is reasoning.
      ended: whether the answer has begun.
    """

    def __init__(self, tags: Tags, phase: Phase, *, keeps_blanks: bool = False) -> None:
        self._keeps_blanks = keeps_blanks
        self._start, self._end = tags.written
        self._text = ""  # what is not done with
        self._begins = phase != "none"  # a start tag may come
        self.found, self.ended = phase == "begun", phase == "none"
        self._is_told = False  # some of the reasoning
        self._behind = False  # where blanks are left out

    @property
    def is_plain(self) -> bool:
        """Whether it is certain that there is no reasoning."""
        return self.ended and not self.found

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning and answer that are certain after more text."""
        self._text += text
        reasoning = ""
        if self._begins:
            self._begin()
        if not self._begins and not self.ended:
            reasoning = self._reason()
        return reasoning, self._answer() if self.ended else ""

    def finish(self) -> tuple[str, str]:
        """The rest, once nothing more will come. The reader is not to be used afterwards."""
        text, self._text = self._text, ""
        if self._begins and not self.found:  # a tag that never was whole
            self._begins, self.ended = False, True
            return "", self._clean(text)
        if self.ended:
            return "", ""
        text = text.rstrip()
        return self._clean(text if self._is_told else text.lstrip()), ""

    def _begin(self) -> None:
        text = self._text.lstrip()
        if text.startswith(self._start):
            self._text, self._begins, self.found = text[len(self._start) :], False, True
        elif not self._start.startswith(text):
            self._begins, self.ended = False, not self.found

    def _reason(self) -> str:
        text, end = self._text, self._text.find(self._end)
        if end >= 0:
            told, self._text = text[:end].rstrip(), text[end + len(self._end) :]
            self.ended, self._behind = True, not self._keeps_blanks
        else:
            told = text[: len(text) - _overlap(text, self._end)].rstrip()
            self._text = text[len(told) :]
        if not self._is_told:
            told = told.lstrip()
        self._is_told = self._is_told or bool(told)
        return self._clean(told)

    def _answer(self) -> str:
        text = self._text
        if self._behind:
            text = text.lstrip()
            self._behind = not text
        self._text = ""
        return self._clean(text)

    @staticmethod
    def _clean(text: str) -> str:
        """Special tokens elsewhere write nothing."""
        return text.replace(_START_MARK, "").replace(_END_MARK, "")


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of the text with which the tag begins."""
    sizes = range(min(len(text), len(tag) - 1), 0, -1)
    return next((size for size in sizes if tag.startswith(text[-size:])), 0)


class ReasoningTokens:
    """Counts the tokens of the reasoning, its tags included, as they come.

    Attributes:
      count: so far, those that may turn out to be the answer's included until that is clear.
    """

    def __init__(self, tags: Tags, phase: Phase, tokenizer: Any) -> None:
        self._stream = TextStream(tokenizer, marks=tags.marks)
        self._reader = ReasoningReader(tags, phase)
        self.count = 0

    def push(self, token: int) -> None:
        """The next token."""
        if not self._reader.ended:
            self._reader.push(self._stream.push(token))
            self.count = 0 if self._reader.is_plain else self.count + 1

    def finish(self) -> None:
        """Nothing more will come."""
        if not self._reader.found:
            self.count = 0
