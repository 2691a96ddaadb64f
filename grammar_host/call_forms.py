"""How models write calls of functions, as far as it is text around JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

CallFormName = Literal["hermes", "llama", "mistral", "mistral_args"]

Mode = Literal["auto", "required", "named"]


@dataclass(frozen=True)
class CallForm:
    """How calls are written: `opening`, calls with `separator` between them, `closing`.

    A call is `head`, the JSON of its arguments, `tail`. In texts, `NAME` stands for the name of the
    function.

    Attributes:
        head: what a call begins with.
        tail: what it ends with.
        separator: what stands between two calls. In free text it may be missing, and other text
            come instead, unless there is an `opening`.
        opening: what the list of all calls begins with; nothing follows its end. Empty: there is no
            list, and each call stands by itself.
        closing: what the list ends with.
        trigger: the beginning of `opening + head` that free text does not have; empty: the head.
        variants: other heads of calls in free text.
        mark: a special token that may precede a call and nothing else, or empty.
        token: a special token that `opening + head` begins with, where the vocabulary has it: an
            answer that must be calls begins with this very token. In free text the model may spell
            it as well. Empty: none.
    """

    head: str
    tail: str
    separator: str
    opening: str = ""
    closing: str = ""
    trigger: str = ""
    variants: tuple[str, ...] = ()
    mark: str = ""
    token: str = ""

    def format(
        self, functions: Sequence[tuple[str, Mapping[str, Any]]], mode: Mode, *, parallel: bool
    ) -> dict[str, Any]:
        """The format of a structural tag.

        Args:
            functions: names and JSON Schemas of the arguments.
            mode: `"auto"`: free text, calls where the model wants them; `"required"`: calls only;
                `"named"`: one call of the only function.
            parallel: whether there may be several calls.
        """
        if mode == "auto":
            return self._free(functions, parallel)
        bare = "" if self.opening else self.token
        calls = [self._call(*each, self.head.removeprefix(bare)) for each in functions]
        calls = [_behind(bare, call) for call in calls] if bare else calls
        several = parallel and mode == "required"
        listed = calls[0] if mode == "named" else self._listed(calls, several)
        if not self.opening:
            return listed
        opening = self.opening.removeprefix(self.token)
        whole = {"type": "tag", "begin": opening, "content": listed, "end": self.closing}
        return _behind(self.token, whole) if self.token else whole

    def _free(
        self, functions: Sequence[tuple[str, Mapping[str, Any]]], parallel: bool
    ) -> dict[str, Any]:
        heads = [self.head, *self.variants]
        tags = [self._call(*each, head) for each in functions for head in heads]
        triggers = [self.trigger] if self.trigger else [tag["begin"] for tag in tags]
        if self.mark:
            tags += [{**tag, "begin": self.mark + tag["begin"]} for tag in tags]
            triggers.append(self.mark)
        if self.opening:
            listed = self._listed(tags, parallel)
            tags = [{"type": "tag", "begin": self.opening, "content": listed, "end": self.closing}]
        return {
            "type": "triggered_tags",
            "triggers": triggers,
            "tags": tags,
            "stop_after_first": bool(self.opening) or not parallel,
        }

    def _listed(self, calls: list[dict[str, Any]], parallel: bool) -> dict[str, Any]:
        return {
            "type": "tags_with_separator",
            "tags": calls,
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }

    def _call(self, name: str, parameters: Mapping[str, Any], head: str) -> dict[str, Any]:
        return {
            "type": "tag",
            "begin": head.replace("NAME", name),
            "content": {"type": "json_schema", "json_schema": parameters},
            "end": self.tail,
        }


def _behind(token: str, content: dict[str, Any]) -> dict[str, Any]:
    begin = {"type": "token", "token": token}
    return {"type": "tag", "begin": begin, "content": content, "end": ""}


HERMES = CallForm(
    head='<tool_call>\n{"name": "NAME", "arguments": ',
    tail="}\n</tool_call>",
    separator="\n",
    trigger="<tool_call>",
)
"""That of Hermes, and of Qwen 2.5 and 3."""

LLAMA = CallForm(
    head='{"name": "NAME", "parameters": ',
    tail="}",
    separator="; ",
    # No shorter trigger: it would take any JSON that has a name for a call.
    variants=('{"type": "function", "name": "NAME", "parameters": ',),
    mark="<|python_tag|>",
)
"""That of Llama 3.x, for functions that are not built in."""

MISTRAL = CallForm(
    head='{"name": "NAME", "arguments": ',
    tail="}",
    separator=", ",
    opening="[TOOL_CALLS][",
    closing="]",
    trigger="[TOOL_CALLS]",
    token="[TOOL_CALLS]",
)
"""That of Mistral's tokenizers up to version 7."""

MISTRAL_ARGS = CallForm(
    head="[TOOL_CALLS]NAME[ARGS]",
    tail="",
    separator="",
    trigger="[TOOL_CALLS]",
    token="[TOOL_CALLS]",
)
"""That of Mistral's tokenizers since version 11, some of which have an id in front of `[ARGS]`."""

CALL_FORMS: Mapping[CallFormName, CallForm] = MappingProxyType(
    {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "mistral_args": MISTRAL_ARGS}
)
