"""Grammars on the host: what may the model write next?

A `Guide` says which language the output must belong to (JSON, a JSON Schema, a regular expression,
a grammar, a choice, structural tags). A `GrammarCompiler` turns it, for the vocabulary described by
a `TokenizerInfo`, into a `Grammar`; each generation gets a `GrammarMatcher` from it, which accepts
tokens, rolls them back and writes token bitmasks. A `GuidedBatch` runs the matchers of all slots of
a decode loop, drafts included, and keeps every failure inside its own slot. Everything here is
NumPy on the host: importing the package imports no engine and no accelerator library; an engine is
loaded when the first guide is compiled.
"""

from grammar_host.backends import SERVED_BACKENDS
from grammar_host.batch import GuidedBatch, SlotCounters
from grammar_host.bitmask import allocate_token_bitmask, bitmask_words
from grammar_host.call_forms import CALL_FORMS, CallForm
from grammar_host.compiler import Grammar, GrammarCompiler
from grammar_host.errors import (
    CompileCrashError,
    CompileServiceError,
    CompileTimeoutError,
    DeadEndError,
    EmptyLanguageError,
    GrammarError,
    GrammarTooComplexError,
    GuideError,
    InvalidGuideError,
    RefusedTokenError,
    TokenizerError,
    UnsupportedGuideError,
)
from grammar_host.guide import Guide
from grammar_host.matcher import GrammarMatcher
from grammar_host.tokenizer import TokenizerInfo

__all__ = [
    "CALL_FORMS",
    "SERVED_BACKENDS",
    "CallForm",
    "CompileCrashError",
    "CompileServiceError",
    "CompileTimeoutError",
    "DeadEndError",
    "EmptyLanguageError",
    "Grammar",
    "GrammarCompiler",
    "GrammarError",
    "GrammarMatcher",
    "GrammarTooComplexError",
    "Guide",
    "GuideError",
    "GuidedBatch",
    "InvalidGuideError",
    "RefusedTokenError",
    "SlotCounters",
    "TokenizerError",
    "TokenizerInfo",
    "UnsupportedGuideError",
    "allocate_token_bitmask",
    "bitmask_words",
]
