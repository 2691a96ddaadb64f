"""LLGuidance (https://github.com/guidance-ai/llguidance): derivatives of regular expressions under
an Earley parser. Needs nothing but its own wheel."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from grammar_host.backends.base import Backend, CompiledGuide, EngineMatcher
from grammar_host.backends.llguidance_source import (
    Source,
    guide_error,
    is_dead_end,
    is_limit,
    more_than_blanks,
    reason_of,
    source_of,
)
from grammar_host.bitmask import allocate_token_bitmask, token_row
from grammar_host.errors import (
    GrammarError,
    GrammarTooComplexError,
    InvalidGuideError,
    UnsupportedGuideError,
)
from grammar_host.guide import Guide
from grammar_host.tokenizer import TokenizerInfo

MAX_LEXER_STATES = 50_000
"""Most states of the lexer that all generations under one grammar share. LLGuidance puts them at 1
to 2 KB each."""

_NO_TOKEN = 0xFFFF_FFFF
_SPECIAL_MARK = b"\xff"

# What a grammar usually takes once some texts have been generated under it. The engine does not say,
# and it grows with the lexer's states, up to their limit.
_MEMORY_BYTES = 300_000
_MEMORY_BYTES_PER_CHARACTER = 50


class LLGuidanceBackend(Backend):
    """Compiles every kind of guide but structural tags with LLGuidance.

    JSON has no blanks before and behind the document. EBNF is rewritten as Lark, exactly; masks
    take longer where it leaves a lexer in doubt, up to milliseconds. Special tokens have no bytes:
    a `lark` or `grammar` guide names them as `<name>` or by id.
    """

    name = "llguidance"

    def __init__(
        self, tokenizer_info: TokenizerInfo, *, limits: LLParserLimits | None = None
    ) -> None:
        """Binds the engine to a vocabulary.

        Args:
            tokenizer_info: the vocabulary.
            limits: what a grammar, and one mask, may cost; None is the library's own limits, but
                for `MAX_LEXER_STATES`.
        """
        self._info = tokenizer_info
        if limits is None:
            limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._limits = limits
        self._without_bytes = frozenset(
            token for token, text in enumerate(tokenizer_info.vocabulary) if not text
        )
        # At once, so that worker processes are forked with it.
        self._text_tokenizer = _new_tokenizer(tokenizer_info.vocabulary)

    def compile(self, guide: Guide) -> CompiledGuide:
        source = source_of(guide, self._info)
        if guide.whitespace_pattern is not None:
            self._require_blanks(guide, guide.whitespace_pattern)
        prototype = self._new_engine(source)
        if prototype.is_error():
            raise guide_error(guide, prototype.get_error())
        warnings = prototype.get_grammar_warnings()
        if warnings:  # each says that a part of the guide is not enforced
            raise UnsupportedGuideError(guide.param, reason_of(guide, "; ".join(warnings)))
        engines = _Engines(guide, prototype, lambda: self._new_engine(source))
        silent = self._without_bytes - (source.special_tokens or frozenset())

        def new_matcher(stop_token_ids: frozenset[int]) -> EngineMatcher:
            return LLGuidanceMatcher(engines, self._roles(source, silent, stop_token_ids))

        memory_bytes = _MEMORY_BYTES + _MEMORY_BYTES_PER_CHARACTER * len(source.lark)
        return CompiledGuide(new_matcher, memory_bytes)

    def _new_engine(self, source: Source) -> Any:
        tokenizer = self._text_tokenizer
        if source.special_tokens is not None:
            tokenizer = self._special_tokenizer
        # Never the bare text: one that begins with "{" would be taken for a serialised grammar.
        grammar = json.dumps({"grammars": [{"lark_grammar": source.lark}]})
        return LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)

    @cached_property
    def _special_tokenizer(self) -> Any:
        vocabulary = list(self._info.vocabulary)
        for token, name in self._info.special_tokens.items():
            vocabulary[token] = _SPECIAL_MARK + name.encode() if name else b""
        return _new_tokenizer(vocabulary)

    def _require_blanks(self, guide: Guide, pattern: str) -> None:
        """Refuses a pattern under which a document would no longer be JSON."""
        engine = self._new_engine(Source(more_than_blanks(pattern)))
        row = allocate_token_bitmask(1, self._info.vocab_size)
        if not engine.is_error():
            _write_mask(engine, row, 0)
        message = engine.get_error()
        if message and not is_dead_end(message):
            raise guide_error(guide, message, "whitespace_pattern")
        if row.any():
            raise InvalidGuideError("whitespace_pattern", "matches more than JSON's blanks")

    def _roles(self, source: Source, silent: frozenset[int], stops: frozenset[int]) -> _Roles:
        named = source.special_tokens
        # The engine writes text; once a grammar speaks of tokens, it may allow any other one too.
        refused = (stops - silent) | (frozenset() if named is None else silent)
        vocab_size = self._info.vocab_size
        return _Roles(
            stops=stops,
            silent=silent,
            endings=stops & (named or frozenset()),
            stop_words=tuple((stop // 32, _bit(stop)) for stop in stops),
            text_row=~token_row(refused, vocab_size) if refused else None,
        )


@dataclass(frozen=True)
class _Roles:
    """What the tokens are to one generation.

    Attributes:
        stops: end the generation, and are never text.
        silent: have no bytes, and the grammar does not name them.
        endings: stop tokens that the grammar names.
        stop_words: of each stop token, the index of its mask word and its bit.
        text_row: int32 [W], 0 at the tokens that the engine may allow but must not; None if there
            are none.
    """

    stops: frozenset[int]
    silent: frozenset[int]
    endings: frozenset[int]
    stop_words: tuple[tuple[int, np.int32], ...]
    text_row: NDArray[np.int32] | None


class _Engines:
    """Makes the engine's matchers of one grammar.

    They share a lexer, whose states are built when they are first needed: later generations are
    faster. But the number of states is bounded, and a lexer that has failed in one generation
    refuses every token in all others. So it is replaced, and everyone replays their tokens.

    Attributes:
        prototype: a matcher at the start; another one whenever the lexer is.
    """

    def __init__(self, guide: Guide, prototype: Any, build: Callable[[], Any]) -> None:
        self.prototype = prototype
        self._guide = guide
        self._build = build

    def after(self, tokens: list[int]) -> tuple[Any, Any]:
        """A matcher that has consumed the tokens, and the prototype that it is a copy of.

        Raises:
            GrammarError: as `fail`.
        """
        for _ in range(2):
            prototype = self.prototype
            engine = prototype.deep_copy()
            if not tokens or engine.consume_tokens(tokens):
                return engine, prototype
            if not self.renew(prototype, engine.get_error()):
                break
        self.fail(engine.get_error(), len(tokens))

    def renew(self, prototype: Any, message: str) -> bool:
        """Replaces the lexer if an error says that it has failed, and nobody has done so yet.

        Returns:
            Whether it has failed.
        """
        failed = message.startswith("lexer error")
        if failed and prototype is self.prototype:
            self.prototype = self._build()
        return failed

    def fail(self, message: str, num_tokens: int) -> NoReturn:
        """Raises what an error in the middle of a generation means.

        Raises:
            GrammarTooComplexError: over a limit of the engine.
            GrammarError: the engine failed.
        """
        reason = f"llguidance gave up after {num_tokens} tokens: {reason_of(self._guide, message)}"
        if is_limit(message):
            raise GrammarTooComplexError(self._guide.param, reason)
        raise GrammarError(f"{self._guide.param}: {reason}")


class LLGuidanceMatcher(EngineMatcher):
    """One generation inside LLGuidance.

    The engine knows of no end of text, and never sees a stop token: its stop tokens belong to the
    vocabulary, ours to the generation. It never leaves an error state either, and a dead end is
    one; then it is dropped, and another one replays the tokens when it is needed.

    Nor does it ever go back: LLGuidance 1.9.1 keeps the last mask under a key that a rollback and other
    tokens may lead to again, where it is wrong. A rollback takes a copy of an engine that stays behind.
    """

    def __init__(
        self,
        engines: _Engines,
        roles: _Roles,
        tokens: Iterable[int] = (),
        *,
        terminated: bool = False,
    ) -> None:
        """Starts a generation.

        Args:
            engines: of the grammar.
            roles: of the tokens.
            tokens: already consumed.
            terminated: whether a stop token has been accepted after them.
        """
        self._engines = engines
        self._roles = roles
        self._tokens = list(tokens)
        self._terminated = terminated
        self._prototype: Any = None
        self._engine: Any = None
        self._behind: Any = None
        """An engine after the first ``_num_behind`` tokens, which has computed no mask."""
        self._num_behind = 0

    def accept_token(self, token_id: int) -> bool:
        if token_id in self._roles.stops:
            self._terminated = self.is_completed() or self._ends_with(token_id)
            return self._terminated
        if token_id in self._roles.silent:
            return False
        engine = self._live()
        accepted = engine.try_consume_tokens([token_id])
        if engine.is_error():
            accepted = self._retry(lambda fresh: fresh.try_consume_tokens([token_id]))
        if accepted:
            self._tokens.append(token_id)
        return bool(accepted)

    def rollback(self, num_tokens: int) -> None:
        if self._terminated:
            self._terminated = False
            num_tokens -= 1
        if num_tokens:
            del self._tokens[-num_tokens:]
            self._engine = self._at_tokens()

    def fill_next_token_bitmask(self, bitmask: NDArray[np.int32], index: int) -> None:
        engine = self._live()
        _write_mask(engine, bitmask, index)
        if engine.is_error():
            self._retry(lambda fresh: _write_mask(fresh, bitmask, index))
        roles = self._roles
        if roles.text_row is not None:
            bitmask[index] &= roles.text_row
        if self.is_completed():
            for word, bit in roles.stop_words:
                bitmask[index, word] |= bit
        else:
            for token in roles.endings:
                if self._ends_with(token):
                    bitmask[index, token // 32] |= _bit(token)

    def is_terminated(self) -> bool:
        return self._terminated

    def is_completed(self) -> bool:
        return self._terminated or bool(self._live().is_accepting())

    def forced_bytes(self) -> bytes:
        # A special token begins with a byte that no text contains.
        return bytes(self._live().compute_ff_bytes()).partition(_SPECIAL_MARK)[0]

    def fork(self) -> LLGuidanceMatcher:
        copy = LLGuidanceMatcher(
            self._engines, self._roles, self._tokens, terminated=self._terminated
        )
        if self._engine is not None:
            copy._prototype, copy._engine = self._prototype, self._engine.deep_copy()
        return copy

    def _live(self) -> Any:
        """The engine's matcher after the tokens, one that works."""
        if self._engine is None or self._prototype is not self._engines.prototype:
            self._engine, self._prototype = self._engines.after(self._tokens)
            self._behind = None
        return self._engine

    def _at_tokens(self) -> Any:
        """A new engine after the tokens; None if it takes a new lexer to have one."""
        if self._prototype is not self._engines.prototype:
            return None
        if self._behind is None or self._num_behind > len(self._tokens):
            self._behind, self._num_behind = self._prototype.deep_copy(), 0
        missing = self._tokens[self._num_behind :]
        if missing and not self._behind.consume_tokens(missing):
            self._behind = None
            return None
        self._num_behind = len(self._tokens)
        return self._behind.deep_copy()

    def _ends_with(self, token_id: int) -> bool:
        """Whether the grammar takes this stop token for its last symbol."""
        if token_id not in self._roles.endings:
            return False
        engine = self._live().deep_copy()
        return bool(engine.try_consume_tokens([token_id]) and engine.is_accepting())

    def _retry(self, operation: Callable[[Any], Any]) -> Any:
        """After an error: the operation's result with a new lexer, if it was the lexer that failed.

        Returns:
            None at a dead end.

        Raises:
            GrammarError: as `_Engines.fail`.
        """
        message = self._drop_engine()
        if self._engines.renew(self._prototype, message):
            engine = self._live()
            result = operation(engine)
            if not engine.is_error():
                return result
            message = self._drop_engine()
            self._engines.renew(self._prototype, message)  # for the others
        if not is_dead_end(message):
            self._engines.fail(message, len(self._tokens))
        return None

    def _drop_engine(self) -> str:
        message = str(self._engine.get_error())
        self._engine = None
        return message


class _Vocabulary:
    """A tokenizer as LLGuidance wants it, which only knows the bytes of its tokens."""

    eos_token_id = _NO_TOKEN
    bos_token_id = None

    def __init__(self, tokens: Iterable[bytes]) -> None:
        self.tokens = list(tokens)

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError("grammars are compiled so that no tokenization is ever forced")


def _new_tokenizer(tokens: Iterable[bytes]) -> Any:
    # Tokens that match a slice are decided together, not one by one. These slices are for strings
    # of JSON, and free text fares no better with others.
    wrapper = TokenizerWrapper(_Vocabulary(tokens))
    return LLTokenizer(wrapper, slices=LLTokenizer.json_slices())


def _bit(token_id: int) -> np.int32:
    return np.uint32(1 << token_id % 32).view(np.int32)


def _write_mask(engine: Any, bitmask: NDArray[np.int32], index: int) -> None:
    row_bytes = 4 * bitmask.shape[1]
    row = ctypes.c_char.from_buffer(bitmask, index * row_bytes)  # type: ignore[arg-type]
    engine.unsafe_compute_mask_ptr(ctypes.addressof(row), row_bytes)
