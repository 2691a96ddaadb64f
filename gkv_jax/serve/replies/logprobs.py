"""Likelihoods of tokens: the model's own, before grammar, bias, penalties and temperature."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from gkv_jax.engine import Engine
from gkv_jax.request import TokenLogprobs

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
    """The older form, of ``/v1/completions``; ``text_offset`` is in characters of the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TokenTexts:
    """What tokens write."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def text(self, token: int) -> str:
        """What a token writes; U+FFFD stands for parts of characters."""
        return self._engine.tokenizer.decode([token], skip_special_tokens=False)

    def bytes(self, token: int) -> list[int] | None:
        """Its bytes; None for special tokens, which write nothing."""
        written = self._engine.compiler.tokenizer_info.vocabulary[token]
        return list(written) if written else None


def for_chat(entries: Sequence[TokenLogprobs], texts: TokenTexts) -> ChoiceLogprobs:
    """As chat completions have it."""

    def facts(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text(token),
            "logprob": max(logprob, LOWEST),
            "bytes": texts.bytes(token),
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
    entries: Sequence[TokenLogprobs], texts: TokenTexts, offset: int = 0
) -> CompletionLogprobs:
    """As completions have it; ``offset``: where the first token's text begins in the answer."""
    tokens = [texts.text(entry.token) for entry in entries]
    offsets = [offset]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[max(entry.logprob, LOWEST) for entry in entries],
        top_logprobs=[
            {texts.text(token): max(logprob, LOWEST) for token, logprob in entry.top}
            for entry in entries
        ],
        text_offset=offsets[:-1],
    )
