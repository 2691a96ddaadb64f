"""The formats in which models write calls: what a guide enforces, and what a parser looks for.

What is read is at most a little looser than what a guide lets a model write, so that everything that is
read as a call has been held to the tools.
"""

import dataclasses
import re
import secrets
import string
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from grammar_host.call_forms import CALL_FORMS, CallForm, CallFormName
from grammar_host.call_patterns import CallPatterns, call_patterns

_MARKS: Mapping[CallFormName, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "mistral_args": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
}
"""What calls are written with that may be special tokens."""

_ID_LETTERS = string.ascii_letters + string.digits

_WRITTEN_ID = "0" * 9
"""What a model writes as the id of a call, where it has to: an id that is unique comes from the server."""

_SHOWN: Mapping[CallFormName, re.Pattern[str]] = {
    "hermes": re.compile(r'<tool_call>\s*\{\s*"name"\s*:\s*"sample_f"\s*,\s*"arguments"'),
    "llama": re.compile(r'\{\s*"name"\s*:\s*"sample_f"\s*,\s*"parameters"\s*:\s*"?\{\\?"sample'),
    "mistral": re.compile(r'\[TOOL_CALLS\](\s*)\[\s*\{\s*"name"\s*:\s*"sample_f"'),
    "mistral_args": re.compile(r"\[TOOL_CALLS\]\s*sample_f\s*(\[CALL_ID\]\s*\w+\s*)?\[ARGS\]"),
}
"""How a call of ``sample_f`` looks in a rendered conversation."""


@dataclasses.dataclass(frozen=True)
class Shown:
    """What a chat template shows of the format of calls.

    Attributes:
      name: the format; None for one that is not known.
      gap: blanks behind ``[TOOL_CALLS]``.
      has_ids: whether ``[CALL_ID]`` and the id of a call precede ``[ARGS]``.
      is_harmony: whether calls are messages on channels, as gpt-oss writes them.
    """

    name: CallFormName | None = None
    gap: str = ""
    has_ids: bool = False
    is_harmony: bool = False

    @classmethod
    def by(cls, template: str, conversation: str) -> "Shown":
        """Look at a template, and at a conversation with a call of ``sample_f`` that it rendered.

        The conversation is empty if it rendered none.
        """
        for name, pattern in _SHOWN.items():
            if (match := pattern.search(conversation)) is not None:
                gap = match[1] if name == "mistral" else ""
                return cls(name, gap, has_ids=name == "mistral_args" and match[1] is not None)
        return cls(is_harmony="<|channel|>" in template and "<|call|>" in template)


NOTHING_SHOWN = Shown()


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """How the calls of one request are written.

    Attributes:
      name: which format it is.
      form: for ``Guide.tools``.
      marks: special tokens that calls are written with, and their names: the text must show them.
      names: the functions that there are, if what is no call of theirs is text; None for any.
      only: whether the answer is calls and no text, so that a call that is cut off in its head is none.
    """

    name: CallFormName
    form: CallForm
    marks: Mapping[int, str] = dataclasses.field(default_factory=dict)
    names: tuple[str, ...] | None = None
    only: bool = False

    @classmethod
    def of(
        cls,
        name: CallFormName,
        names: Iterable[str] = (),
        special_tokens: Mapping[int, str] = MappingProxyType({}),
        shown: Shown = NOTHING_SHOWN,
        *,
        only: bool = False,
    ) -> "CallFormat":
        """A format, for a vocabulary and some tools.

        Args:
          name: which one.
          names: of the functions.
          special_tokens: those of the vocabulary, and their names.
          shown: the details that the chat template shows of the format, if it is that one.
          only: whether the answer is calls and no text.
        """
        marks = {token: text for token, text in special_tokens.items() if text in _MARKS[name]}
        form = CALL_FORMS[name]
        token, mark = (text if text in marks.values() else "" for text in (form.token, form.mark))
        form = dataclasses.replace(form, token=token, mark=mark)
        if shown.name == name == "mistral":
            form = dataclasses.replace(form, opening=f"[TOOL_CALLS]{shown.gap}[")
        if shown.name == name and shown.has_ids:
            form = dataclasses.replace(form, head=f"[TOOL_CALLS]NAME[CALL_ID]{_WRITTEN_ID}[ARGS]")
        return cls(name, form, marks, tuple(names) if name == "llama" else None, only)

    @property
    def patterns(self) -> CallPatterns:
        """What a parser looks for."""
        return call_patterns(self.name, self.names)

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


HERMES_FORMAT = CallFormat.of("hermes")
"""That of models whose chat template shows none."""


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The special tokens of a transformers tokenizer, and their names."""
    added = tokenizer.added_tokens_decoder.items()
    return {token: facts.content for token, facts in added if facts.special}
