"""Likelihoods of tokens: the model's own, before grammar, bias, penalties and temperature."""

import functools
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from gkv_jax.engine import Engine
from gkv_jax.errors import UserError
from gkv_jax.request import TokenLogprobs
from gkv_jax.text import TextStream, token_text
from grammar_host import GrammarError

LOWEST = -9999.0
"""JSON has no infinity: what is less likely is told as this, as OpenAI does."""


class TopLogprob(BaseModel):
    """A token that might have been."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer, and the likeliest at its place."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    """Of each token of a choice, or of a chunk of it."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """The older form, of ``/v1/completions``; ``text_offset`` is in characters of the answer.

    Tokens that are parts of one character have its offset. Those of a stop text, which the answer leaves
    out, have the offsets that they would have.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TokenTexts:
    """What tokens write. What was asked for is remembered: at most a vocabulary.

    Any thread may use it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def text_of(self, token: int) -> str:
        """What a token writes, see ``token_text``."""
        return self._facts(token)[0]

    def bytes_of(self, token: int) -> list[int] | None:
        """Its bytes; None for special tokens, which write nothing, and where nobody can say."""
        return self._facts(token)[1]

    def offsets(self) -> "Offsets":
        """Of the tokens of an answer, which are still to come."""
        return Offsets(self, self._engine.tokenizer)

    def _facts(self, token: int) -> tuple[str, list[int] | None]:
        if token not in self._known:
            text = token_text(self._engine.tokenizer.backend_tokenizer, token)
            self._known[token] = text, self._bytes(token, text)
        return self._known[token]

    def _bytes(self, token: int, text: str) -> list[int] | None:
        if self._vocabulary is not None:
            written = self._vocabulary[token]
        else:
            is_exact = token not in self._special and "\ufffd" not in text
            written = text.encode() if is_exact else b""
        return list(written) or None

    @functools.cached_property
    def _vocabulary(self) -> Sequence[bytes] | None:
        """Of all tokens; None where the tokenizer does not serve for guides, but for free text."""
        try:
            return self._engine.compiler.tokenizer_info.vocabulary
        except (GrammarError, UserError):
            return None

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        added = self._engine.tokenizer.added_tokens_decoder
        return frozenset(token for token, facts in added.items() if facts.special)


class Offsets:
    """Where in the answer the text of each token begins, in characters, as the tokens come."""

    def __init__(self, texts: TokenTexts, tokenizer: Any) -> None:
        """``tokenizer`` is a transformers fast tokenizer."""
        self._texts, self._stream, self._end = texts, TextStream(tokenizer), 0

    def push(self, token: int) -> int:
        """Of the next token; a part of a character has the offset of the character."""
        begin, text = self._end, self._stream.push(token)
        self._end += len(text)
        own = self._texts.text_of(token)
        # What is in front of it was held back: parts of a character that never came.
        return self._end - len(own) if text.endswith(own) else begin


def for_chat(entries: Sequence[TokenLogprobs], texts: TokenTexts) -> ChoiceLogprobs:
    """As chat completions have it."""

    def facts(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text_of(token),
            "logprob": max(logprob, LOWEST),
            "bytes": texts.bytes_of(token),
        }

    return ChoiceLogprobs.model_validate(
        {
            "content": [
                facts(entry.token, entry.logprob)
                | {"top_logprobs": [facts(token, logprob) for token, logprob in entry.top]}
                for entry in entries
            ]
        }
    )


def for_completion(
    entries: Sequence[TokenLogprobs], texts: TokenTexts, offsets: Offsets
) -> CompletionLogprobs:
    """As completions have it; ``offsets`` has seen the tokens before these."""
    return CompletionLogprobs(
        tokens=[texts.text_of(entry.token) for entry in entries],
        token_logprobs=[max(entry.logprob, LOWEST) for entry in entries],
        top_logprobs=[_by_text(entry, texts) for entry in entries],
        text_offset=[offsets.push(entry.token) for entry in entries],
    )


def _by_text(entry: TokenLogprobs, texts: TokenTexts) -> dict[str, float]:
    """The likeliest first. Of tokens with one text, such as parts of characters, the likeliest counts."""
    told: dict[str, float] = {}
    for token, logprob in entry.top:
        told.setdefault(texts.text_of(token), max(logprob, LOWEST))
    return told
