"""Chats as requests bring them: what the chat template gets, and how the answer is to be read."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from gkv_jax.errors import UserError
from gkv_jax.serve.errors import ApiError, logger
from gkv_jax.serve.protocol.formats import Constraint
from gkv_jax.serve.reasoning import Phase, Tags
from gkv_jax.serve.settings import Chat
from gkv_jax.serve.template import ChatTemplate
from gkv_jax.serve.tools import Conversation, ServedFormat, ToolChoice
from grammar_host import Grammar

_SWITCHES = ("enable_thinking", "thinking")
"""Variables with which templates let the model think, or not."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """How an answer is to be read.

    Attributes:
      tags: those around its reasoning; None if none is told apart.
      phase: whether it holds reasoning.
      tokenizer: what its tokens write.
      keeps_blanks: whether blanks between reasoning and answer are the answer's.
    """

    tags: Tags | None = None
    phase: Phase = "none"
    tokenizer: Any = None
    keeps_blanks: bool = False

    @property
    def marks(self) -> Mapping[int, str]:
        """What special tokens write in the text of the answer."""
        return {} if self.tags is None or self.phase == "none" else self.tags.marks

    def under(self, grammar: Grammar | None, *, may_call: bool) -> "Reading":
        """The same under a grammar. One that was made for calls owns no blanks."""
        if grammar is None or may_call:
            return self
        return dataclasses.replace(self, keeps_blanks=grammar.owns_blanks)

    def constraint(self, constraint: Constraint | None) -> Constraint | None:
        """A constraint on what follows the reasoning."""
        if self.tags is None or constraint is None:
            return constraint
        return self.tags.constraint(constraint, self.phase)


class ChatReader:
    """Reads the chats of one server.

    Attributes:
      tags: those around the model's reasoning; None if none is told apart.
      tool_format: how the model writes calls; None if tools are refused.
    """

    def __init__(self, tokenizer: Any, chat: Chat) -> None:
        """Of a model.

        Args:
          tokenizer: a transformers tokenizer.
          chat: what the server was told.

        Raises:
          UserError: it sets what the chat template does not read.
        """
        self._tokenizer, self._defaults = tokenizer, chat.template_kwargs
        self._tool_format = chat.tool_format
        served = ServedFormat.of(tokenizer, chat.tool_format)
        self.tool_format = served.name
        if served.note:
            logger.warning("%s", served.note)
        self.tags = Tags.of(chat.reasoning, tokenizer)
        both = [ChatTemplate.of(tokenizer, tools=tools) for tools in (False, True)]
        ChatTemplate("", both[0].variables | both[1].variables).check(
            chat.template_kwargs, "chat.template_kwargs", tokenizer
        )

    def conversation(
        self,
        messages: Sequence[BaseModel | Mapping[str, Any]],
        tools: Sequence[BaseModel | Mapping[str, Any]] | None,
        tool_choice: ToolChoice | str | Mapping[str, Any] | None,
        parallel: bool | None,
        *,
        places: Mapping[str, str] | None = None,
    ) -> tuple[Conversation, bool]:
        """What is said, and whether reasoning of earlier turns is left out.

        It is, as their own templates do it, with models that reason and whose template does not read it.

        Args:
          messages: of Chat Completions' form; the rest is as for ``Conversation.of``.
          places: from fields of messages to what the client calls them.

        Raises:
          ApiError: the conversation does not hold together, or there is reasoning and the model knows none.
        """
        turns = [_fields(message) for message in messages]
        leaves_out = False
        if not self._template(tools=bool(tools)).reads_reasoning:
            for index, turn in enumerate(turns):
                if not turn.pop("reasoning_content", None):  # an empty one says nothing
                    continue
                if self.tags is None:
                    path = f"messages.{index}.reasoning_content"
                    param = (places or {}).get(path, path)
                    message = (
                        f"'{param}' is not served: the model's chat template has no place for reasoning; "
                        "leave it out, or write it into the content"
                    )
                    raise ApiError(400, message, param=param, code="unsupported_parameter")
                leaves_out = True
        talk = Conversation.of(
            turns,
            tools,
            tool_choice,
            parallel,
            tokenizer=self._tokenizer,
            tool_format=self._tool_format,
        )
        return talk, leaves_out

    def variables(
        self,
        given: Mapping[str, Any] | None,
        effort: str | None = None,
        *,
        tools: bool = False,
        effort_field: str = "reasoning_effort",
    ) -> dict[str, Any]:
        """What the chat template gets besides messages and tools: the server's values under the request's.

        Args:
          given: ``chat_template_kwargs``.
          effort: how much the model shall think.
          tools: whether the template gets tools.
          effort_field: what the client calls ``effort``.

        Raises:
          ApiError: a value that the template does not take.
        """
        template, field = self._template(tools=tools), "chat_template_kwargs"
        given = given or {}
        for name, value in given.items():
            try:
                template.check({name: value}, field, self._tokenizer)
            except UserError as error:
                param = f"{field}.{name}"
                raise ApiError(400, str(error), param=param, code="invalid_value") from error
        asked = {} if effort is None else self._effort(template, effort, effort_field)
        for name in asked.keys() & given.keys():
            if asked[name] != given[name]:
                message = f"{effort_field} and {field}.{name} contradict each other; leave one out"
                raise ApiError(400, message, param=effort_field, code="invalid_value")
        defaults = {
            name: self._defaults[name] for name in template.variables & self._defaults.keys()
        }
        return {**defaults, **asked, **given}

    def reading(self, prompt: Sequence[int]) -> Reading:
        """How an answer to a chat is to be read; ``prompt`` are its tokens."""
        if self.tags is None:
            return Reading()
        return Reading(self.tags, self.tags.phase(prompt, self._tokenizer), self._tokenizer)

    def _template(self, *, tools: bool) -> ChatTemplate:
        return ChatTemplate.of(self._tokenizer, tools=tools)

    def _effort(self, template: ChatTemplate, effort: str, field: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if "reasoning_effort" in template.variables:
            values["reasoning_effort"] = effort
        values |= {name: effort != "none" for name in _SWITCHES if name in template.variables}
        if not values and (effort != "none" or self.tags is not None):
            message = (
                f"'{field}' is not served: the model's chat template reads neither reasoning_effort nor "
                f"{' nor '.join(_SWITCHES)}; leave it out, and bound the answer with its limit of tokens"
            )
            raise ApiError(400, message, param=field, code="unsupported_parameter")
        return values


def _fields(message: BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(message, BaseModel):
        return message.model_dump(by_alias=True, exclude_none=True)
    return dict(message)
