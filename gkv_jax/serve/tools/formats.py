"""The formats in which models write calls: what a guide enforces, and what a parser looks for.

What is read is at most a little looser than what a guide lets a model write, so that everything that is
read as a call has been held to the tools.
"""

import dataclasses
import functools
import re
import secrets
import string
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from grammar_host.call_forms import CALL_FORMS, LLAMA, CallForm, CallFormName

_MARKS: Mapping[CallFormName, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "mistral_args": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
}
"""What calls are written with that may be special tokens."""

_ID_LETTERS = string.ascii_letters + string.digits

Pieces = tuple[str, ...]
"""Regular expressions, one after the other."""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A text to be found that comes in parts.

    Attributes:
      whole: matches it.
      begun: matches, up to the end of the text, what may still become it.
    """

    whole: re.Pattern[str]
    begun: re.Pattern[str]

    @classmethod
    def of(
        cls, *variants: Pieces, names: Iterable[str] | None = None, ahead: str = ""
    ) -> "Pattern":
        """Any of some texts.

        Args:
          variants: the texts. The piece ``_NAME`` is a group of its own.
          names: the only names that there are; None for any.
          ahead: what follows and does not belong to it.
        """
        name = _NAME if names is None else f"({'|'.join(map(re.escape, names))})"
        texts = ("".join(name if piece == _NAME else piece for piece in each) for each in variants)
        return cls(
            re.compile(f"(?:{'|'.join(texts)}){ahead}"),
            re.compile("|".join(_begun(each) for each in variants)),
        )


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a parser looks for.

    Attributes:
      head: the beginning of a call, up to the brace of its arguments.
      tail: what follows them.
      next: the beginning of a call directly behind another one, if it can look different there.
      close: what may follow the last call, without being text.
    """

    head: Pattern
    tail: Pattern
    next: Pattern | None = None
    close: Pattern | None = None


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """How the calls of one request are written.

    Attributes:
      name: which format it is.
      form: for ``Guide.tools``.
      marks: special tokens that calls are written with, and their names: the text must show them.
      names: the functions that there are, if what is no call of theirs is text; None for any.
    """

    name: CallFormName
    form: CallForm
    marks: Mapping[int, str] = dataclasses.field(default_factory=dict)
    names: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        name: CallFormName,
        names: Iterable[str] = (),
        special_tokens: Mapping[int, str] = MappingProxyType({}),
        gap: str = "",
    ) -> "CallFormat":
        """A format, for a vocabulary and some tools.

        Args:
          name: which one.
          names: of the functions.
          special_tokens: those of the vocabulary, and their names.
          gap: blanks behind ``[TOOL_CALLS]``, as older tokenizers of Mistral have them.
        """
        marks = {token: text for token, text in special_tokens.items() if text in _MARKS[name]}
        form = CALL_FORMS[name]
        if name == "mistral" and gap:
            form = dataclasses.replace(form, opening=f"[TOOL_CALLS]{gap}[")
        token, mark = (text if text in marks.values() else "" for text in (form.token, form.mark))
        form = dataclasses.replace(form, token=token, mark=mark)
        return cls(name, form, marks, tuple(names) if name == "llama" else None)

    @property
    def reading(self) -> Reading:
        """What a parser looks for."""
        return _reading(self.name, self.names)

    @property
    def allows_json_beside(self) -> bool:
        """Whether no JSON document can be taken for a call or hold what is read as one."""
        return self.name in ("hermes", "mistral")

    def new_id(self) -> str:
        """The id of a call. Mistral's chat templates want nine letters and digits."""
        if self.name in ("mistral", "mistral_args"):
            return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def write(self, calls: Iterable[tuple[str, str]]) -> str:
        """Calls as a guide has them, given as names and JSON texts of their arguments."""
        form = self.form
        written = (form.head.replace("NAME", name) + text + form.tail for name, text in calls)
        return form.opening + form.separator.join(written) + form.closing


_NAME = "([a-zA-Z0-9_-]{1,64})"
_BLANKS = r"\s*"


def _literal(text: str) -> Pieces:
    return tuple(map(re.escape, text))


def _spaced(*words: str) -> Pieces:
    """Words with blanks between them, where JSON and habit have some."""
    pieces: list[str] = []
    for word in words:
        pieces += (_NAME,) if word == _NAME else _literal(word)
        pieces.append(_BLANKS)
    return tuple(pieces)


def _json_head(key: str) -> Pieces:
    name = (*_literal('"'), _NAME, *_literal('"'), _BLANKS)
    return (*_spaced("{", '"name"', ":"), *name, *_spaced(",", f'"{key}"', ":"))


def _begun(pieces: Pieces) -> str:
    # The whole text is another pattern's, and what lacks only what is ahead is at its end.
    return functools.reduce(lambda rest, piece: rf"{piece}(?:\Z|{rest})", reversed(pieces), r"(?!)")


_OBJECT = r"(?=\{)"
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
_ARGS_ID = (*_literal("[CALL_ID]"), _BLANKS, "[a-zA-Z0-9_-]*", _BLANKS)
_ARGS = (*_literal("[ARGS]"), _BLANKS)


@functools.lru_cache(maxsize=64)
def _reading(name: CallFormName, names: tuple[str, ...] | None) -> Reading:
    match name:
        case "hermes":
            return Reading(Pattern.of(_HERMES_HEAD, ahead=_OBJECT), Pattern.of(_HERMES_TAIL))
        case "llama":
            following = tuple((_BLANKS, *_spaced(";"), *head) for head in _LLAMA_HEADS)
            return Reading(
                Pattern.of(*_LLAMA_HEADS, names=names, ahead=_OBJECT),
                Pattern.of((_BLANKS, *_literal("}"))),
                next=Pattern.of(*following, names=names, ahead=_OBJECT),
            )
        case "mistral":
            opening = _spaced("[TOOL_CALLS]", "[")
            tail = (_BLANKS, *_literal("}"))
            return Reading(
                Pattern.of((*opening, *_MISTRAL_HEAD), ahead=_OBJECT),
                Pattern.of(tail, (_BLANKS, *_MISTRAL_ID, *tail)),
                next=Pattern.of((_BLANKS, *_spaced(","), *_MISTRAL_HEAD), ahead=_OBJECT),
                close=Pattern.of((_BLANKS, *_literal("]"))),
            )
        case "mistral_args":
            heads = ((*_ARGS_HEAD, *_ARGS), (*_ARGS_HEAD, *_ARGS_ID, *_ARGS))
            return Reading(Pattern.of(*heads, ahead=_OBJECT), Pattern.of(()))


HERMES_FORMAT = CallFormat.of("hermes")
"""That of models whose chat template shows no other."""


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The special tokens of a transformers tokenizer, and their names."""
    added = tokenizer.added_tokens_decoder.items()
    return {token: facts.content for token, facts in added if facts.special}


_SHOWN: Mapping[CallFormName, re.Pattern[str]] = {
    "hermes": re.compile(r'<tool_call>\s*\{\s*"name"\s*:\s*"sample_f"\s*,\s*"arguments"'),
    "llama": re.compile(r'\{\s*"name"\s*:\s*"sample_f"\s*,\s*"parameters"\s*:\s*"?\{\\?"sample'),
    "mistral": re.compile(r'\[TOOL_CALLS\](\s*)\[\s*\{\s*"name"\s*:\s*"sample_f"'),
    "mistral_args": re.compile(r"\[TOOL_CALLS\]\s*sample_f\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]"),
}
"""How a call of ``sample_f`` looks in a rendered conversation."""


@dataclasses.dataclass(frozen=True)
class Shown:
    """What a chat template shows of the format of calls.

    Attributes:
      name: the format; None for one that is not known.
      gap: blanks behind ``[TOOL_CALLS]``.
      is_harmony: whether calls are messages on channels, as gpt-oss writes them.
    """

    name: CallFormName | None = None
    gap: str = ""
    is_harmony: bool = False

    @classmethod
    def by(cls, template: str, conversation: str) -> "Shown":
        """Look at a template, and at a conversation with a call of ``sample_f`` that it rendered.

        The conversation is empty if it rendered none.
        """
        for name, pattern in _SHOWN.items():
            if (match := pattern.search(conversation)) is not None:
                return cls(name, match[1] if name == "mistral" else "")
        return cls(is_harmony="<|channel|>" in template and "<|call|>" in template)


NOTHING_SHOWN = Shown()
