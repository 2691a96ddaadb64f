"""Errors of the grammar host.

Every message is one line and, where there is a way out, names it. Every error carries a `code` that
programs can act on, the `param` (the field of the request) that caused it, and for a part of a JSON
document its JSON pointer. Three families, so that a server can answer each one properly:

- `GuideError`: the caller's guide cannot be served (a 400 of that request, before any token);
- `DeadEndError`, `RefusedTokenError`, `CompileServiceError`: a request failed without a fault of
  its guide, or while it was running;
- `TokenizerError`: the tokenizer cannot be used for guided decoding at all (start-up).
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

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
    """Base of every error that this package raises about a grammar, a guide or a token.

    Attributes:
        code: what went wrong, for programs; the same in every release.
        param: the field of the request that is to blame, None if none is.
        pointer: JSON pointer (RFC 6901) of the part of `param` that is to blame, None if unknown.
    """

    code: str = "grammar_error"
    param: str | None = None
    pointer: str | None = None


class TokenizerError(GrammarError):
    """The tokenizer's vocabulary cannot be turned into bytes, or has no stop token."""

    code = "unusable_tokenizer"


class GuideError(GrammarError):
    """A guide that cannot be served.

    Attributes:
        param: the field as callers spell it: `"json"`, `"schema"`, `"regex"`, `"grammar"`,
            `"lark"`, `"choice"`, `"structural_tag"`, `"tools"`, `"tool_choice"`, `"backend"` or
            the name of an option.
        reason: the message without the field.
    """

    param: str

    def __init__(
        self, param: str, reason: str, *, pointer: str | None = None, code: str | None = None
    ) -> None:
        where = "" if pointer is None else f"at {pointer or 'the root'}: "
        super().__init__(f"{param}: {where}{reason}")
        self.param = param
        self.reason = reason
        self.pointer = pointer
        self.code = self._default_code(param) if code is None else code

    @classmethod
    def _default_code(cls, param: str) -> str:
        return cls.code

    def __reduce__(self) -> tuple[Any, ...]:
        arguments: dict[str, Any] = {"pointer": self.pointer, "code": self.code}
        return partial(type(self), **arguments), (self.param, self.reason)


class InvalidGuideError(GuideError):
    """The guide is malformed: bad JSON, bad regular expression, undefined rule.

    Its code is `invalid_json_schema` for schemas, else `invalid_` and the field.
    """

    @classmethod
    def _default_code(cls, param: str) -> str:
        return "invalid_json_schema" if param == "schema" else f"invalid_{param}"


class UnsupportedGuideError(GuideError):
    """The guide is well formed, but the engine asked for, or every served one, cannot enforce it.

    Its code is `unsupported_schema_feature` for schemas, else `unsupported_` and the field.
    """

    @classmethod
    def _default_code(cls, param: str) -> str:
        return "unsupported_schema_feature" if param == "schema" else f"unsupported_{param}"


class EmptyLanguageError(GuideError):
    """No text at all can satisfy the guide."""

    code = "empty_language"


class GrammarTooComplexError(GuideError):
    """The guide is over a limit: size, nesting, an engine's fuel, the compiler's memory."""

    code = "grammar_too_complex"


class CompileTimeoutError(GuideError):
    """Compiling the guide took longer than the compiler's deadline, and was stopped."""

    code = "grammar_compile_timeout"


class CompileCrashError(GuideError):
    """The engine brought its process down while it compiled the guide."""

    code = "grammar_compile_crash"


class CompileServiceError(GrammarError):
    """The processes that compile guides cannot be run, or were stopped: no guide is to blame."""

    code = "compile_service_unavailable"


class DeadEndError(GrammarError):
    """The grammar reached a state in which no token of the vocabulary is legal.

    Attributes:
        pointer: of the schema's keyword that no continuation can satisfy, where that is known.
    """

    code = "dead_end"

    def __init__(self, message: str, *, pointer: str | None = None) -> None:
        super().__init__(message)
        self.pointer = pointer


class RefusedTokenError(GrammarError):
    """The model emitted a token that the grammar does not allow.

    Attributes:
        token_id: the token.
    """

    code = "refused_token"

    def __init__(self, token_id: int, reason: str) -> None:
        super().__init__(f"token {token_id} was refused: {reason}")
        self.token_id = token_id
        self.reason = reason

    def __reduce__(self) -> tuple[type[RefusedTokenError], tuple[int, str]]:
        return type(self), (self.token_id, self.reason)
