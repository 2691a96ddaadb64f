"""Grammar engines. Each is imported when it is first used, never before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from grammar_host.backends.base import Backend
from grammar_host.errors import InvalidGuideError
from grammar_host.tokenizer import TokenizerInfo


def _xgrammar(tokenizer_info: TokenizerInfo) -> Backend:
    from grammar_host.backends.xgrammar import XGrammarBackend

    return XGrammarBackend(tokenizer_info)


def _llguidance(tokenizer_info: TokenizerInfo) -> Backend:
    from grammar_host.backends.llguidance import LLGuidanceBackend

    return LLGuidanceBackend(tokenizer_info)


def _outlines(tokenizer_info: TokenizerInfo) -> Backend:
    from grammar_host.backends.outlines import OutlinesBackend

    return OutlinesBackend(tokenizer_info)


SERVED_BACKENDS: Mapping[str, Callable[[TokenizerInfo], Backend]] = MappingProxyType(
    {"xgrammar": _xgrammar, "llguidance": _llguidance, "outlines": _outlines}
)
"""Engines that can be asked for by name. An engine joins by one module and one line here."""


def check_backend_name(name: str) -> None:
    """Refuses an engine that is not served.

    Raises:
        InvalidGuideError: of `backend`; the message lists what is served.
    """
    if name != "auto" and name not in SERVED_BACKENDS:
        served = ", ".join(["auto", *SERVED_BACKENDS])
        raise InvalidGuideError("backend", f"{name!r} is not served; served are: {served}")
