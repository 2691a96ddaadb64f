"""XGrammar (https://github.com/mlc-ai/xgrammar, arXiv:2411.15100): the default engine.

Importing this module imports torch and transformers, because `xgrammar` does; nothing else in the
package does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import xgrammar
from numpy.typing import NDArray

from grammar_host.backends.base import Backend, CompiledGuide, EngineMatcher
from grammar_host.backends.xgrammar_emptiness import derives_nothing
from grammar_host.backends.xgrammar_regex import checked_regex
from grammar_host.bitmask import token_row
from grammar_host.errors import (
    EmptyLanguageError,
    GuideError,
    InvalidGuideError,
    UnsupportedGuideError,
    clean_reason,
)
from grammar_host.guide import DEFAULT_MAX_WHITESPACE, Guide, part_guide
from grammar_host.named_tokens import named_special_tokens
from grammar_host.tags import premature_stops, replace_part, tag_formats, tag_parts
from grammar_host.tokenizer import TokenizerInfo

_EMPTY = "no finite text satisfies it; check for rules or schemas that require themselves"


class XGrammarBackend(Backend):
    """Compiles every kind of guide with XGrammar.

    Special tokens have no bytes, so that no grammar lets the model write `<|im_end|>` as if it
    were text; only the special tokens that a `grammar`, `lark` or `structural_tag` guide names
    (by text or by id) get theirs for that guide.
    """

    name = "xgrammar"

    def __init__(self, tokenizer_info: TokenizerInfo) -> None:
        self._tokenizer_info = tokenizer_info
        self._without_bytes = frozenset(
            token for token, text in enumerate(tokenizer_info.vocabulary) if not text
        )
        # One engine compiler per set of named special tokens; a handful of sets is ever in use.
        self._compiler = lru_cache(maxsize=8)(self._new_compiler)
        self._compiler(frozenset())

    def compile(self, guide: Guide) -> CompiledGuide:
        named = named_special_tokens(guide, self._tokenizer_info)
        engine, info = self._compiler(named)
        try:
            compiled = self._compile(guide, engine, info)
        except GuideError:
            raise
        except Exception as error:  # the engine raises RuntimeError for everything, and others
            raise _guide_error(guide, str(error)) from None
        unwritable = self._without_bytes - named
        new = BudgetedXGrammarMatcher if _has_token_budget(guide) else XGrammarMatcher

        def new_matcher(stop_token_ids: frozenset[int]) -> EngineMatcher:
            matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=sorted(stop_token_ids))
            written = frozenset(t for t in stop_token_ids if self._tokenizer_info.vocabulary[t])
            return new(
                matcher,
                unwritable - stop_token_ids,
                written,
                ~token_row(written, self._tokenizer_info.vocab_size),
            )

        return CompiledGuide(new_matcher, int(compiled.memory_size_bytes))

    def _new_compiler(self, named: frozenset[int]) -> tuple[Any, Any]:
        vocabulary = list(self._tokenizer_info.vocabulary)
        for token in named:
            vocabulary[token] = self._tokenizer_info.special_tokens[token].encode()
        info = xgrammar.TokenizerInfo(
            vocabulary,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=self._tokenizer_info.vocab_size,
            stop_token_ids=list(self._tokenizer_info.stop_token_ids),
        )
        threads = min(8, os.cpu_count() or 1)
        return xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False), info

    def _compile(self, guide: Guide, engine: Any, info: Any) -> Any:
        if guide.kind == "structural_tag":
            self._check_stops(guide)
            return engine.compile_structural_tag(_engine_tag(guide, info))
        return engine.compile_grammar(_to_grammar(guide, info))

    def _check_stops(self, guide: Guide) -> None:
        stops = {*self._tokenizer_info.stop_token_ids}
        names = {self._tokenizer_info.special_tokens.get(token) for token in stops}
        for pointer in premature_stops(guide.document, lambda token: token in stops | names):
            raise InvalidGuideError(
                guide.param, "a stop token ends the text, but more must follow", pointer=pointer
            )


class XGrammarMatcher(EngineMatcher):
    """One generation inside XGrammar."""

    def __init__(
        self,
        matcher: Any,
        unwritable: frozenset[int],
        written_stops: frozenset[int],
        text_row: NDArray[np.int32],
    ) -> None:
        """Wraps the engine's matcher.

        Args:
            matcher: an `xgrammar.GrammarMatcher`.
            unwritable: tokens without bytes, stop tokens aside.
            written_stops: stop tokens that have bytes, so that XGrammar may take them for text.
            text_row: int32 [W], every bit 1 but those of `written_stops`.
        """
        self._matcher = matcher
        self._unwritable = unwritable
        self._written_stops = written_stops
        self._text_row = text_row

    def accept_token(self, token_id: int) -> bool:
        # XGrammar prints a warning for every special token that it refuses.
        if token_id in self._unwritable:
            return False
        if token_id in self._written_stops and not self.is_completed():
            return False
        return bool(self._matcher.accept_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def fill_next_token_bitmask(self, bitmask: NDArray[np.int32], index: int) -> None:
        self._matcher.fill_next_token_bitmask(bitmask, index)
        # XGrammar allows a stop token whose own bytes would complete the text, and terminates
        # there. Whoever cuts the stop token off would be left with an incomplete text.
        if self._written_stops and not self.is_completed():
            bitmask[index] &= self._text_row

    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def is_completed(self) -> bool:
        return bool(self._matcher.is_completed())

    def forced_bytes(self) -> bytes:
        return str(self._matcher.find_jump_forward_string()).encode()

    def fork(self) -> XGrammarMatcher:
        return type(self)(
            self._matcher.fork(), self._unwritable, self._written_stops, self._text_row
        )


class BudgetedXGrammarMatcher(XGrammarMatcher):
    """One generation with a part of at most so many tokens (`max_tokens`).

    XGrammar's masks honour the budget, but `accept_token` only where a mask was filled just before;
    else it takes further tokens and prints a warning. So a token is looked up in the mask first.
    """

    def accept_token(self, token_id: int) -> bool:
        row = np.empty((1, self._text_row.size), dtype=np.int32)
        self.fill_next_token_bitmask(row, 0)
        legal = int(row[0, token_id // 32]) >> token_id % 32 & 1
        return bool(legal) and super().accept_token(token_id)


def model_tools_tag(
    family: str,
    functions: Iterable[tuple[str, dict[str, Any]]],
    tool_choice: str | dict[str, Any],
    *,
    parallel: bool,
) -> dict[str, Any]:
    """The structural tag of tool calls as a family of models writes them, without reasoning.

    Args:
        family: one that XGrammar knows.
        functions: names and JSON Schemas of the arguments.
        tool_choice: `"auto"`, `"required"` or OpenAI's object that names a function.
        parallel: whether there may be several calls.
    """
    tag = xgrammar.get_model_structural_tag(
        family,
        tools=[
            # Functions that are not strict would get any JSON as arguments.
            {
                "type": "function",
                "function": {"name": name, "parameters": parameters, "strict": True},
            }
            for name, parameters in functions
        ],
        tool_choice=tool_choice,
        reasoning="disabled",
        max_whitespace_cnt=DEFAULT_MAX_WHITESPACE,
        parallel_tool_calls=parallel,
    )
    document: dict[str, Any] = tag.model_dump()
    return document


def _engine_tag(guide: Guide, info: Any) -> dict[str, Any]:
    """A structural tag as the engine gets it: JSON parts as grammars.

    Left to itself, the engine closes the objects of a JSON part, drops some of their required
    properties, and bounds no blanks.

    Raises:
        GuideError: a part is malformed, or no text satisfies it.
    """
    document: dict[str, Any] = guide.document
    for part in tag_parts(guide.document):
        try:
            grammar = _to_grammar(part_guide(part), info)
        except GuideError as error:
            raise type(error)(guide.param, error.reason, pointer=part.pointer) from None
        except Exception as error:  # as in `compile`
            raise _guide_error(guide, str(error), part.pointer) from None
        node = part.format
        if node["type"] != "json_schema":
            continue
        if node.get("style", "json") == "json" and not node.get("excludes"):
            node = {"type": "grammar", "grammar": str(grammar)}
        else:
            node = {"max_whitespace_cnt": DEFAULT_MAX_WHITESPACE, **node}
        document = replace_part(document, part.format_pointer, node)
    for pointer, node in tag_formats(guide.document):
        if node.get("type") == "exclude_token":  # the engine would let a stop token be that token
            excluded = [*node.get("exclude_tokens", ()), *info.stop_token_ids]
            document = replace_part(document, pointer, {**node, "exclude_tokens": excluded})
    return document


def _to_grammar(guide: Guide, info: Any) -> Any:
    grammar = _parse(guide, info)
    if derives_nothing(grammar.serialize_json()):
        raise EmptyLanguageError(guide.param, _EMPTY)
    return grammar


def _parse(guide: Guide, info: Any) -> Any:
    if guide.kind == "json":
        return _json_grammar('{"type": "object"}', guide)
    if guide.kind == "json_schema":
        return _json_grammar(guide.text, guide)
    if guide.kind == "regex":
        return xgrammar.Grammar.from_regex(checked_regex(guide.text))
    if guide.kind == "lark":
        return xgrammar.Grammar.from_lark(guide.text, tokenizer_info=info)
    if guide.kind == "choice":
        alternatives = " | ".join(_quote(choice) for choice in guide.document)
        return xgrammar.Grammar.from_ebnf(f"root ::= {alternatives}")
    return xgrammar.Grammar.from_ebnf(guide.text)


def _json_grammar(schema: str, guide: Guide) -> Any:
    if guide.whitespace_pattern is not None:
        raise UnsupportedGuideError(
            "whitespace_pattern", "xgrammar bounds blanks by number only; use max_whitespace"
        )
    if guide.max_whitespace == 0:
        return xgrammar.Grammar.from_json_schema(
            schema, any_whitespace=False, separators=(",", ":"), strict_mode=False
        )
    bound = None if guide.max_whitespace == "free" else guide.max_whitespace
    return xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=bound, strict_mode=False)


def _quote(text: str) -> str:
    """A string literal of the EBNF: control characters must be escaped there."""
    escaped = (
        f"\\u{ord(character):04x}" if ord(character) < 0x20 or character in '"\\' else character
        for character in text
    )
    return f'"{"".join(escaped)}"'


def _has_token_budget(guide: Guide) -> bool:
    return guide.kind == "structural_tag" and any(
        node.get("max_tokens") is not None for _, node in tag_formats(guide.document)
    )


def _guide_error(guide: Guide, message: str, pointer: str | None = None) -> GuideError:
    reason = clean_reason(message)
    # "Nothing satisfies this part" is a refusal, too: the part may be optional, so it does not
    # follow that the language is empty.
    kind = UnsupportedGuideError if "not supported" in reason else InvalidGuideError
    return kind(guide.param, reason, pointer=pointer)
