"""Prompts: texts, chats and token ids, and the tokens that the model reads of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

import numpy as np

from gkv_jax.cache import CacheSpec, longest_text
from gkv_jax.errors import PromptTooLongError, UserError
from gkv_jax.models.protocol import Decoder

Message = Mapping[str, Any]
"""A chat message, ``{"role": ..., "content": ...}`` and whatever else the chat template reads."""

Prompt = str | Sequence[Message] | Sequence[int]
"""A text to continue, chat messages, or token ids."""


_REFUSALS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a chat template may run into with values that it was not made for: it is a program."""


@dataclasses.dataclass(frozen=True)
class PromptReader:
    """Prompts into tokens.

    Attributes:
      tokenizer: a transformers fast tokenizer.
      model: which has a row for each token, and was trained for so many positions.
      spec: of the cache that is to hold them.
    """

    tokenizer: Any
    model: Decoder
    spec: CacheSpec

    def encode(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        template: Mapping[str, Any] | None,
        answer: bool,
    ) -> tuple[int, ...]:
        """The tokens of a prompt; see ``Engine.encode``."""
        if not isinstance(prompt, Sequence):
            raise UserError(f"prompt is {prompt!r}; give a string, a list of messages or token ids")
        if not prompt:
            raise UserError("prompt is empty; give at least one character, message or token id")
        is_chat = not isinstance(prompt, str) and not _is_id(prompt[0])
        for given, value in (("tools are", tools), ("template is", template)):
            if value and not is_chat:
                raise UserError(f"{given} given, but prompt is no chat; give a list of messages")
        if isinstance(prompt, str):
            # Not verbose: a text longer than the trained length is no mistake here.
            tokens = self.tokenizer.encode(prompt, verbose=False)
        elif is_chat:
            tokens = self._encode_chat(
                cast(Sequence[Message], prompt), tools, template or {}, answer
            )
        else:
            tokens = list(prompt)
            wrong = [t for t in tokens if not _is_id(t) or not 0 <= t < self.model.vocab_size]
            if wrong:
                raise UserError(
                    f"prompt holds {wrong[0]!r}, which is no token id; they are integers from 0 to "
                    f"{self.model.vocab_size - 1}"
                )
        if not tokens:
            raise UserError("prompt has no tokens; give at least one character or message")
        if max(tokens) >= self.model.vocab_size:
            raise UserError(
                f"prompt holds token {max(tokens)}, beyond the model's {self.model.vocab_size}; "
                "tokenizer and model do not belong together"
            )
        return tuple(map(int, tokens))

    def check_length(self, length: int) -> None:
        """Raise PromptTooLongError if no answer could follow a prompt of so many tokens."""
        spec, trained = self.spec, self.model.max_positions
        longest, policy = longest_text(spec, self.model), f"policy {spec.policy_name!r}"
        problem = None
        if spec.max_tokens is not None:
            if length > longest:
                problem = (
                    f"{policy} has room for {longest} (the cache holds {spec.max_tokens}, the model "
                    f"was trained for {trained})"
                )
        elif spec.selects(length - 1) and length > trained:
            problem = (
                f"{policy} reads it in one piece and the model was trained for {trained} positions"
            )
        elif length > longest and longest < spec.longest_text(trained):
            raise PromptTooLongError(
                f"prompt has {length} tokens, but the model uses positions in code of its own, and was made "
                f"for {trained} of them; shorten it"
            )
        elif length > longest:
            problem = (
                f"{policy} keeps tokens at their positions in the text and the model was trained "
                f"for {trained}"
            )
        if problem:
            raise PromptTooLongError(
                f"prompt has {length} tokens, but {problem}; shorten it, or use policy 'window'"
            )

    def _encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        template: Mapping[str, Any],
        answer: bool,
    ) -> list[int]:
        import jinja2

        if not self.tokenizer.chat_template:
            raise UserError(
                "prompt is a chat, but the tokenizer has no chat template; give a string"
            )
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=answer,
                tokenize=True,
                return_dict=False,
                tokenizer_kwargs={"verbose": False},
                **template,
            )
        except (jinja2.TemplateError, *_REFUSALS) as error:
            reason = str(error) or type(error).__name__
            what = f"the messages or {', '.join(template)}" if template else "the messages"
            raise UserError(
                f"prompt: the chat template refuses {what} ({reason}); each message needs 'role' and "
                "'content', and what this template does not take, another role or an order of turns, goes "
                "into turns that it takes: user and assistant, one after the other"
            ) from error


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Prompts, of which there may be only one.

    Raises:
      UserError: it is neither.
    """
    if not isinstance(prompts, Sequence):
        raise UserError(f"prompts is {prompts!r}; give a string, messages, or a list of those")
    is_one = isinstance(prompts, str) or (
        len(prompts) > 0 and (isinstance(prompts[0], Mapping) or _is_id(prompts[0]))
    )
    return cast(list[Prompt], [prompts] if is_one else list(prompts))


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
