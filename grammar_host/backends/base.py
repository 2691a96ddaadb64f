"""What an engine must provide. Everything else (checks, stop rows, accounting) is done once, above.

To add an engine, write one module in this folder with a `Backend` and an `EngineMatcher` and list
it in `grammar_host.backends`. Names follow XGrammar and TensorRT-LLM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grammar_host.guide import Guide


class EngineMatcher(ABC):
    """The state of one generation inside an engine.

    Used by one thread at a time, and only through `grammar_host.matcher.GrammarMatcher`, which
    guarantees: token ids are within 0..V-1, rollback counts are possible, mask rows have the right
    dtype, width and layout, and neither `accept_token` nor `fill_next_token_bitmask` is called
    after termination. An implementation must not check these again, must not print, and must not
    change its state except in `accept_token` and `rollback`.
    """

    @abstractmethod
    def accept_token(self, token_id: int) -> bool:
        """Consumes one token; False, with the state unchanged, if it is not legal here.

        A stop token is legal exactly where the text so far is complete, and terminates.
        """

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undoes the last `num_tokens` accepted tokens, stop tokens included."""

    @abstractmethod
    def fill_next_token_bitmask(self, bitmask: NDArray[np.int32], index: int) -> None:
        """Writes every word of row `index` of `bitmask` (int32 [rows, W]): bit 1 = legal next.

        Bits at and above V may hold anything. All bits 0 means a dead end: not an error here.
        """

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether a stop token has been accepted."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether the text so far is a whole text of the language (it may still continue)."""

    @abstractmethod
    def forced_bytes(self) -> bytes:
        """The bytes that every continuation must begin with; does not change the state.

        Empty where there is a choice or the text may end here. Need not be the longest such
        string, and may stop inside of a character. Asked only before termination.
        """

    def explain_dead_end(self) -> tuple[str, str | None] | None:
        """Why the last mask had no legal token: a reason and a JSON pointer; None if unknown."""
        return None

    @abstractmethod
    def fork(self) -> EngineMatcher:
        """An independent copy in the same state, with the same rollback history."""


NewMatcher = Callable[[frozenset[int]], EngineMatcher]
"""Starts a generation, given the stop tokens in force."""


@dataclass(frozen=True)
class CompiledGuide:
    """What an engine makes of a guide, shared by all generations that use it.

    Attributes:
        new_matcher: starts a generation, given the stop tokens in force. Thread-safe.
        memory_bytes: approximate size, for the cache's accounting.
    """

    new_matcher: NewMatcher
    memory_bytes: int


class Backend(ABC):
    """An engine bound to one vocabulary.

    What takes time once for all belongs into the constructor, which must start no thread: worker
    processes are forked behind it. `compile` may be called from several threads at once. It must
    not cache (the compiler does), must not enforce less than the guide says without saying so, and
    must raise nothing but `GuideError`s about the guide.
    """

    name: str

    @abstractmethod
    def compile(self, guide: Guide) -> CompiledGuide:
        """Compiles a guide.

        Raises:
            InvalidGuideError: the engine refuses the text.
            UnsupportedGuideError: the engine does not serve this kind, construct or option.
            GrammarTooComplexError: over a limit of the engine.
            EmptyLanguageError: the engine can tell that no text satisfies the guide.
        """
