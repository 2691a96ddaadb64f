"""Grammar engines. Each is imported when it is first used, never before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from grammar_host.backends.base import Backend
from grammar_host.tokenizer import TokenizerInfo


def _xgrammar(tokenizer_info: TokenizerInfo) -> Backend:
    from grammar_host.backends.xgrammar import XGrammarBackend

    return XGrammarBackend(tokenizer_info)


SERVED_BACKENDS: Mapping[str, Callable[[TokenizerInfo], Backend]] = MappingProxyType(
    {"xgrammar": _xgrammar}
)
"""Engines that can be asked for by name. An engine joins by one module and one line here."""


def resolve_backend_name(name: str) -> str:
    """The engine that serves `name`; `"auto"` is the first one listed.

    Raises:
        ValueError: not served; the message lists what is.
    """
    if name == "auto":
        return next(iter(SERVED_BACKENDS))
    if name not in SERVED_BACKENDS:
        served = ", ".join(["auto", *SERVED_BACKENDS])
        raise ValueError(f"backend {name!r} is not served; served are: {served}")
    return name
