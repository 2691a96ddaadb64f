"""Models that think before they answer: where the reasoning is, in a prompt, under a guide, in an answer.

Models write it between two tags. Whether an answer begins inside of it, the prompt's end tells: chat
templates open it, close it at once, or leave that to the model.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gkv_jax.errors import UserError
from gkv_jax.serve.protocol.formats import Constraint
from gkv_jax.serve.settings import AUTO, OFF, USUAL_TAGS, read_tags
from gkv_jax.text import TextStream
from grammar_host import Guide, GuideError
from grammar_host.optional_reasoning import require_tags
from grammar_host.reasoning import BLANKS
from grammar_host.tokenizer import TokenizerInfo

Phase = Literal["none", "possible", "begun"]
"""Whether an answer holds reasoning: it cannot, it does if it begins with the tag, or it begins inside."""

_BLANKS = BLANKS.decode()
"""What grammars take for blanks: no others are stripped, so that what is left obeys."""

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

    def check(self, tokenizer_info: TokenizerInfo) -> None:
        """Whether a model can write both.

        Args:
          tokenizer_info: the model's vocabulary, with the stop tokens of its generations.

        Raises:
          UserError: it cannot.
        """
        try:
            require_tags(tokenizer_info, self.start, self.end)
        except GuideError as error:
            raise UserError(
                f"chat.reasoning: {error.reason}; name other tags, or write {OFF!r}"
            ) from error

    def phase(self, prompt: Sequence[int], tokenizer: Any) -> Phase:
        """What a prompt's end says of the answer."""
        tail = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip(_BLANKS)
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
        return self._clean(text.rstrip(_BLANKS) if self._is_told else text.strip(_BLANKS)), ""

    def _begin(self) -> None:
        text = self._text.lstrip(_BLANKS)
        if text.startswith(self._start):
            self._text, self._begins, self.found = text[len(self._start) :], False, True
        elif not self._start.startswith(text):
            self._begins, self.ended = False, not self.found

    def _reason(self) -> str:
        text, end = self._text, self._text.find(self._end)
        if end >= 0:
            told, self._text = text[:end].rstrip(_BLANKS), text[end + len(self._end) :]
            self.ended, self._behind = True, not self._keeps_blanks
        else:
            told = text[: len(text) - _overlap(text, self._end)].rstrip(_BLANKS)
            self._text = text[len(told) :]
        if not self._is_told:
            told = told.lstrip(_BLANKS)
        self._is_told = self._is_told or bool(told)
        return self._clean(told)

    def _answer(self) -> str:
        text = self._text
        if self._behind:
            text = text.lstrip(_BLANKS)
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
    """Counts the tokens of the reasoning as they come, and those of blanks that are left out behind it.

    Attributes:
      count: tokens of the reasoning, its tags included. Until it is clear that there is any, those that may
        turn out to be the answer's are among them.
      before: tokens before the first one of the answer: ``count``, and those of the blanks.
      is_certain: whether the answer has begun, so that neither changes any more.
    """

    def __init__(
        self, tags: Tags, phase: Phase, tokenizer: Any, *, keeps_blanks: bool = False
    ) -> None:
        self._stream = TextStream(tokenizer, marks=tags.marks)
        self._reader = ReasoningReader(tags, phase, keeps_blanks=keeps_blanks)
        self._open = 0  # tokens of a character that is not whole yet
        self.count = self.before = 0
        self.is_certain = False

    def push(self, token: int) -> None:
        """The next token."""
        if self.is_certain:
            return
        is_reasoning = not self._reader.ended
        text = self._stream.push(token)
        _, answer = self._reader.push(text)
        self.is_certain = bool(answer) or self._reader.is_plain
        if self._reader.is_plain:
            self.count = self.before = 0
        elif is_reasoning:
            self.count = self.before = self.count + 1
        elif not answer:
            self._open += 1
            if text:
                self.before, self._open = self.before + self._open, 0

    def finish(self) -> None:
        """Nothing more will come."""
        self.is_certain = True
        if not self._reader.found:
            self.count = self.before = 0
