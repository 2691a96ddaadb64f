"""Errors of the grammar host.

Every message is one line and, where there is a way out, names it. Three families, so that a server
can answer each one properly:

- `GuideError`: the caller's guide cannot be served (a 400 of that request, before any token);
- `DeadEndError`, `RefusedTokenError`: a request failed while it was running;
- `TokenizerError`: the tokenizer cannot be used for guided decoding at all (start-up).
"""

from __future__ import annotations

import re

MAX_REASON_CHARACTERS = 400

_LOG_PREFIX = re.compile(r"\[\d\d:\d\d:\d\d\]\s+\S+\.(?:cc|h|cpp|hpp|cu):\d+:\s*")
_FAILED_CHECK = re.compile(r"Check failed: \(.*?\) is false:\s*")


def clean_reason(message: str) -> str:
    """Turns an engine's message into one line without timestamps, source paths or check macros."""
    message = _FAILED_CHECK.sub("", _LOG_PREFIX.sub("", message))
    message = " ".join(message.split())
    if len(message) > MAX_REASON_CHARACTERS:
        message = message[: MAX_REASON_CHARACTERS - 1] + "…"
    return message or "the grammar engine gave no reason"


class GrammarError(ValueError):
    """Base of every error that this package raises about a grammar, a guide or a token."""


class TokenizerError(GrammarError):
    """The tokenizer's vocabulary cannot be turned into bytes, or has no stop token."""


class GuideError(GrammarError):
    """A guide that cannot be served.

    Attributes:
        field: the kind of guide as callers spell it: `"json"`, `"schema"`, `"regex"`, `"grammar"`,
            `"lark"`, `"choice"`, `"structural_tag"`.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[type[GuideError], tuple[str, str]]:
        return type(self), (self.field, self.reason)


class InvalidGuideError(GuideError):
    """The guide is malformed: bad JSON, bad regular expression, undefined rule, over a limit."""


class UnsupportedGuideError(GuideError):
    """The guide is well formed, but no served engine can enforce it."""


class EmptyLanguageError(GuideError):
    """No text at all can satisfy the guide."""


class DeadEndError(GrammarError):
    """The grammar reached a state in which no token of the vocabulary is legal."""


class RefusedTokenError(GrammarError):
    """The model emitted a token that the grammar does not allow.

    Attributes:
        token_id: the token.
    """

    def __init__(self, token_id: int, reason: str) -> None:
        super().__init__(f"token {token_id} was refused: {reason}")
        self.token_id = token_id
        self.reason = reason

    def __reduce__(self) -> tuple[type[RefusedTokenError], tuple[int, str]]:
        return type(self), (self.token_id, self.reason)
