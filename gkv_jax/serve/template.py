"""Chat templates: what they read of what a request may say."""

import functools
import inspect
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.defaults
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from gkv_jax.errors import UserError


class _Generation(jinja2.ext.Extension):
    """The tag with which templates of transformers mark what is to be learned."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def template_variables(source: str) -> frozenset[str]:
    """The variables that a template reads and does not set itself.

    Raises:
      jinja2.TemplateError: it is no template.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    found = jinja2.meta.find_undeclared_variables(environment.parse(source))
    return frozenset(found - jinja2.defaults.DEFAULT_NAMESPACE.keys())


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer.

    Attributes:
      source: its text; empty if there is none.
      variables: those that a request may set.
    """

    source: str
    variables: frozenset[str]

    @classmethod
    def of(cls, tokenizer: Any, *, tools: bool) -> "ChatTemplate":
        """Of a transformers tokenizer, which may have another one for chats with tools."""
        if not tokenizer.chat_template:
            return cls("", frozenset())
        source = ""
        try:
            source = tokenizer.get_chat_template(tools=[] if tools else None)
            variables = template_variables(source)
        except (ValueError, jinja2.TemplateError):
            # None for such chats, or a broken one: the engine tells the client when it uses it.
            variables = frozenset()
        return cls(source, variables - _not_for_requests(tokenizer))

    @property
    def reads_reasoning(self) -> bool:
        """Whether it looks for the reasoning of earlier turns of the assistant."""
        return "reasoning_content" in self.source

    def check(self, values: Mapping[str, Any], field: str, tokenizer: Any) -> None:
        """Whether values can be handed to the template.

        Raises:
          UserError: a name that is not a request's to set, one that the template does not read, or a
            value that is no text that a prompt can hold.
        """
        for name, value in values.items():
            shown = f"{field}.{name}"
            if name in _not_for_requests(tokenizer):
                raise UserError(f"{shown} is set by the server; leave it out")
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none"
                raise UserError(
                    f"{shown} is not read by the model's chat template; it reads: {known}"
                )
            if not _is_fit(value):
                raise UserError(
                    f"{shown} contains a NUL character or a lone surrogate, or has more than "
                    f"{_MAX_NESTING} levels; give a plain value"
                )


_MAX_NESTING = 16
"""Levels of a value for a template."""

_GIVEN = frozenset(
    {"messages", "conversations", "raise_exception", "strftime_now"}
    | {f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
)
"""What transformers gives templates, besides what are its own arguments."""


def _not_for_requests(tokenizer: Any) -> frozenset[str]:
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    return frozenset(own) - {"kwargs"} | _GIVEN | tokenizer.special_tokens_map.keys()


def _is_fit(value: Any, levels: int = _MAX_NESTING) -> bool:
    if isinstance(value, str):
        try:
            return b"\0" not in value.encode()
        except UnicodeEncodeError:
            return False
    inner: Iterable[Any]
    if isinstance(value, Mapping):
        inner = itertools.chain(value.keys(), value.values())
    elif isinstance(value, list):
        inner = value
    else:
        return True
    return levels > 0 and all(_is_fit(each, levels - 1) for each in inner)
