"""What calls of functions look like in a text, as far as it is text around JSON.

What is found is at most a little looser than what `grammar_host.call_forms` lets a model write, so that
the calls of an unguided model are found as well, with blanks where JSON and habit have some.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from grammar_host.call_forms import LLAMA, CallFormName

_NAME = "([a-zA-Z0-9_-]{1,64})"
_BLANKS = r"\s*"
_OBJECT = r"(?=\{)"

Pieces = tuple[str, ...]
"""Regular expressions, one after the other."""


@dataclass(frozen=True)
class Pattern:
    """A text to be found that comes in parts.

    Attributes:
        whole: matches it.
        begun: matches, up to the end of the text, what may still become it.
        variants: the texts that it may be.
    """

    whole: re.Pattern[str]
    begun: re.Pattern[str]
    variants: tuple[Pieces, ...]

    @classmethod
    def of(cls, *variants: Pieces, names: Iterable[str] | None = None, ahead: str = "") -> Pattern:
        """Any of some texts.

        Args:
            variants: the texts. The piece `_NAME` is a group of its own. Between two pieces that
                may be as long as they like there is one that is not: so nothing is read twice.
            names: the only names that there are; None for any.
            ahead: what follows and does not belong to it.
        """
        name = _NAME if names is None else f"({'|'.join(map(re.escape, names))})"
        texts = ("".join(name if piece == _NAME else piece for piece in each) for each in variants)
        return cls(
            re.compile(f"(?:{'|'.join(texts)}){ahead}"),
            re.compile("|".join(_begun(each) for each in variants)),
            variants,
        )


@dataclass(frozen=True)
class CallPatterns:
    """What calls of one form look like. Between `head` and `tail` is the JSON of the arguments.

    Attributes:
        head: the beginning of a call, up to the brace of its arguments.
        tail: what follows them.
        next: the beginning of a call directly behind another one.
        close: what may follow the last call, without being text.
    """

    head: Pattern
    tail: Pattern
    next: Pattern
    close: Pattern | None = None

    def may_follow(self, text: str, position: int = 0) -> bool:
        """Whether the text behind a call may still become another one, or their end."""
        patterns = (self.next, self.close) if self.close else (self.next,)
        return any(pattern.begun.match(text, position) for pattern in patterns)


@functools.lru_cache(maxsize=64)
def call_patterns(name: CallFormName, names: tuple[str, ...] | None = None) -> CallPatterns:
    """The patterns of a form.

    Args:
        name: which form.
        names: for `"llama"`, the functions that there are; None for any.
    """
    match name:
        case "hermes":
            return CallPatterns(
                Pattern.of(_HERMES_HEAD, ahead=_OBJECT),
                Pattern.of(_HERMES_TAIL),
                next=Pattern.of((_BLANKS, *_HERMES_HEAD), ahead=_OBJECT),
            )
        case "llama":
            following = tuple((_BLANKS, *_spaced(";"), *head) for head in _LLAMA_HEADS)
            return CallPatterns(
                Pattern.of(*_LLAMA_HEADS, names=names, ahead=_OBJECT),
                Pattern.of((_BLANKS, *_literal("}"))),
                next=Pattern.of(*following, names=names, ahead=_OBJECT),
            )
        case "mistral":
            opening = _spaced("[TOOL_CALLS]", "[")
            tail = (_BLANKS, *_literal("}"))
            return CallPatterns(
                Pattern.of((*opening, *_MISTRAL_HEAD), ahead=_OBJECT),
                Pattern.of(tail, (_BLANKS, *_MISTRAL_ID, *tail)),
                next=Pattern.of((_BLANKS, *_spaced(","), *_MISTRAL_HEAD), ahead=_OBJECT),
                close=Pattern.of((_BLANKS, *_literal("]"))),
            )
        case "mistral_args":
            heads = ((*_ARGS_HEAD, *_ARGS), (*_ARGS_HEAD, *_ARGS_ID, *_ARGS))
            return CallPatterns(
                Pattern.of(*heads, ahead=_OBJECT),
                Pattern.of(()),
                next=Pattern.of(*((_BLANKS, *head) for head in heads), ahead=_OBJECT),
            )


def _literal(text: str) -> Pieces:
    return tuple(map(re.escape, text))


def _spaced(*words: str) -> Pieces:
    """Words with blanks between them, where JSON and habit have some."""
    pieces: list[str] = []
    for word in words:
        pieces += _literal(word)
        pieces.append(_BLANKS)
    return tuple(pieces)


def _json_head(key: str) -> Pieces:
    name = (*_literal('"'), _NAME, *_literal('"'), _BLANKS)
    return (*_spaced("{", '"name"', ":"), *name, *_spaced(",", f'"{key}"', ":"))


def _begun(pieces: Pieces) -> str:
    # The whole text is another pattern's, and what lacks only what is ahead is at its end.
    return functools.reduce(lambda rest, piece: rf"{piece}(?:\Z|{rest})", reversed(pieces), r"(?!)")


_HERMES_HEAD = (*_spaced("<tool_call>"), *_json_head("arguments"))
_HERMES_TAIL = (_BLANKS, *_spaced("}"), *_literal("</tool_call>"))
# As they are enforced, to the letter: in free text, other spellings are not.
_LLAMA_HEADS = tuple(
    tuple(piece for part in text.split("NAME") for piece in (*_literal(part), _NAME))[:-1]
    for head in (LLAMA.head, *LLAMA.variants)
    for text in (head, LLAMA.mark + head)
)
_MISTRAL_HEAD = _json_head("arguments")
_MISTRAL_ID = (*_spaced(",", '"id"', ":"), *_literal('"'), "[a-zA-Z0-9_-]*", *_literal('"'))
_ARGS_HEAD = (*_literal("[TOOL_CALLS]"), _BLANKS, _NAME, _BLANKS)
_ARGS_ID = (*_literal("[CALL_ID]"), _BLANKS, "[a-zA-Z0-9_-]+", _BLANKS)
_ARGS = (*_literal("[ARGS]"), _BLANKS)
