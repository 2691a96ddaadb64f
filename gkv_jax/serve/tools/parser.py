"""From the text of an answer, as it is written, to what the client gets of it: text and calls."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gkv_jax.serve.tools.formats import HERMES_FORMAT, CallFormat
from grammar_host.object_scanner import ObjectScanner


@dataclass(frozen=True)
class TextDelta:
    """Text outside of the calls."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """The call number ``index`` of the answer begins; ``id`` is the one that its result names."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnds:
    """The call is complete."""

    index: int


AnswerEvent = TextDelta | CallBegins | CallArguments | CallEnds


class ToolCallParser:
    """Takes the calls out of a text that comes in pieces; where it is cut makes no difference.

    A call begins when its name and the brace of its arguments are there, and its arguments go out as
    they come. Held back is only what may become the beginning of a call, the end of one, and blanks in
    front of one.

    Whole calls and the text around them are those of ``grammar_host.tools.parse_tool_calls``: if there are
    calls, the text has no blanks at its end, and none at its start if nothing else precedes the first call.
    Blanks between two parts of the text are kept.

    A call that begins and does not end has no ``CallEnds``. If a token limit or a stop text ended the
    answer, what came of its arguments has been sent. If something else than a call follows, which only
    a text that no guide ruled does, that goes on as content.

    A call that the answer's end cuts off in its head, before its arguments, is left out where it is certain
    that it would have been one: directly behind another, and in answers of calls only. What else might have
    become a call is content.
    """

    def __init__(self, call_format: CallFormat = HERMES_FORMAT) -> None:
        """``call_format``: how calls are written."""
        self._format, self._patterns = call_format, call_format.patterns
        self._text = ""  # what is not done with
        self._sent = 0  # how much of it was sent
        self._calls = 0
        self._scanner: ObjectScanner | None = None  # inside of a call
        self._closed = False  # behind the arguments of a call
        self._follows = False  # directly behind a call
        self._blanks = ""
        self._has_content = False

    def push(self, text: str) -> list[AnswerEvent]:
        """What is certain after more text."""
        self._text += text
        return list(self._events())

    def finish(self) -> list[AnswerEvent]:
        """The rest, once nothing more will come. The parser is not to be used afterwards."""
        events = list(self._events())
        begun = self._patterns.head.begun.match(self._text) if self._format.only else None
        if self._scanner is None and not self._follows and begun is None:
            events.extend(self._content(len(self._text)))
        if self._blanks and not self._calls:
            events.append(TextDelta(self._blanks))
        return events

    def _events(self) -> Iterator[AnswerEvent]:
        before = None
        while before != (before := (self._scanner, self._closed, self._follows, len(self._text))):
            if self._follows:
                yield from self._behind()
            elif self._scanner is None:
                yield from self._outside()
            elif not self._closed:
                yield from self._arguments(self._scanner)
            else:
                yield from self._tail(self._scanner)

    def _outside(self) -> Iterator[AnswerEvent]:
        # A call that broke off may hold a head in the arguments that were sent; none is told twice.
        heads = self._patterns.head.whole.finditer(self._text)
        head = next((head for head in heads if head.end() > self._sent), None)
        if head is None:
            begun = self._patterns.head.begun.search(self._text)
            yield from self._content(len(self._text) if begun is None else begun.start())
            return
        yield from self._content(head.start())
        if not self._has_content:
            self._blanks = ""
        yield from self._begin(head)

    def _behind(self) -> Iterator[AnswerEvent]:
        """What stands between calls and closes their list is no text."""
        close = self._patterns.close
        if (head := self._patterns.next.whole.match(self._text)) is not None:
            yield from self._begin(head)
        elif close and (end := close.whole.match(self._text)) is not None:
            self._follows = False
            self._consume(end.end())
        elif not self._patterns.may_follow(self._text):
            self._follows = False

    def _begin(self, head: re.Match[str]) -> Iterator[AnswerEvent]:
        name = next(filter(None, head.groups()))
        yield CallBegins(self._calls, self._format.new_id(), name)
        self._calls += 1
        self._consume(head.end() - head.start())
        self._sent = 0
        self._scanner, self._follows = ObjectScanner(), False

    def _arguments(self, scanner: ObjectScanner) -> Iterator[AnswerEvent]:
        outcome = scanner.scan(self._text)
        # What is open may be the beginning of a number or an escape: that is right so far, too.
        end = len(self._text) if outcome == "open" else scanner.position
        if end > self._sent:
            yield CallArguments(self._calls - 1, self._text[self._sent : end])
            self._sent = end
        if outcome == "closed":
            self._closed = True
        elif outcome == "broken":
            self._scanner = None

    def _tail(self, scanner: ObjectScanner) -> Iterator[AnswerEvent]:
        tail = self._patterns.tail.whole.match(self._text, scanner.position)
        if tail is not None:
            yield CallEnds(self._calls - 1)
            self._consume(tail.end())
            self._sent = 0
            self._follows = True
        elif self._patterns.tail.begun.match(self._text, scanner.position):
            return
        self._scanner, self._closed = None, False

    def _content(self, end: int) -> Iterator[AnswerEvent]:
        """Send the text up to ``end``, except what was sent as arguments of a call that broke off."""
        text = self._blanks + self._text[self._sent : end]
        self._consume(end)
        if self._calls and not self._has_content:
            text = text.lstrip()
        visible = text.rstrip()
        self._blanks = text[len(visible) :]
        if visible:
            self._has_content = True
            yield TextDelta(visible)

    def _consume(self, end: int) -> None:
        self._text = self._text[end:]
        self._sent = max(0, self._sent - end)


@dataclass(frozen=True)
class AnswerCall:
    """A call in a whole answer.

    Attributes:
      id: what its result names.
      name: the function.
      arguments: JSON text; the beginning of one unless ``complete``.
      complete: whether the call came to its end.
    """

    id: str
    name: str
    arguments: str
    complete: bool


@dataclass(frozen=True)
class ReadAnswer:
    """All events of an answer together.

    A call that a token limit cut off is one of ``calls``, with what there is of its arguments, as in
    OpenAI's API: a stream has sent it already, and both ways must say the same. The client knows it by
    the finish reason ``"length"``, which wins over ``"tool_calls"`` in both.

    Attributes:
      content: the text outside of the calls.
      calls: in their order.
    """

    content: str
    calls: tuple[AnswerCall, ...]

    @classmethod
    def of(cls, events: Iterable[AnswerEvent]) -> "ReadAnswer":
        """Put the events of a parser together."""
        content: list[str] = []
        begun: list[CallBegins] = []
        arguments: list[list[str]] = []
        ended: set[int] = set()
        for event in events:
            match event:
                case TextDelta(text):
                    content.append(text)
                case CallBegins():
                    begun.append(event)
                    arguments.append([])
                case CallArguments(index, text):
                    arguments[index].append(text)
                case CallEnds(index):
                    ended.add(index)
        calls = (
            AnswerCall(call.id, call.name, "".join(arguments[call.index]), call.index in ended)
            for call in begun
        )
        return cls("".join(content), tuple(calls))

    @classmethod
    def read(cls, text: str, call_format: CallFormat = HERMES_FORMAT) -> "ReadAnswer":
        """Read a whole answer, exactly as a stream of it is read."""
        parser = ToolCallParser(call_format)
        return cls.of([*parser.push(text), *parser.finish()])

    def finish_reason(self, reason: str) -> str:
        """The engine's finish reason, as OpenAI says it of an answer with calls.

        ``"tool_calls"`` says that the client may run the calls, so it is said only of whole ones: a
        call cut off by a stop text leaves it at ``"stop"``.
        """
        if reason == "stop" and self.calls and all(call.complete for call in self.calls):
            return "tool_calls"
        return reason
