"""An engine that plays a script: for tests of everything above the engine, and for timing overlap.

Deterministic and without any dependency. A script can be slow, fail or run into a dead end at a
chosen position, which real engines do too rarely to test with.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grammar_host.backends.base import Backend, CompiledGuide, EngineMatcher
from grammar_host.bitmask import token_row
from grammar_host.guide import Guide


@dataclass(frozen=True)
class Script:
    """What is legal at each position of the text; after the last one, only stop tokens are.

    Attributes:
        allowed: the legal token ids of positions 0, 1, 2, ...
        fill_delay_s: seconds that every mask takes, to make overlap visible.
        fail_at: position whose mask raises `RuntimeError`, as an engine with a bug would.
        dead_end_at: position at which nothing is legal.
    """

    allowed: tuple[frozenset[int], ...]
    fill_delay_s: float = 0.0
    fail_at: int | None = None
    dead_end_at: int | None = None

    @classmethod
    def of(
        cls,
        allowed: Sequence[Iterable[int]],
        *,
        fill_delay_s: float = 0.0,
        fail_at: int | None = None,
        dead_end_at: int | None = None,
    ) -> Script:
        """The same from any sequence of iterables of ids."""
        sets = tuple(frozenset(ids) for ids in allowed)
        return cls(sets, fill_delay_s, fail_at, dead_end_at)


class ScriptedBackend(Backend):
    """Serves the same script for every guide."""

    name = "scripted"

    def __init__(self, script: Script) -> None:
        self._script = script

    def compile(self, guide: Guide) -> CompiledGuide:
        """Ignores what the guide says: the script is the language."""

        def new_matcher(stop_token_ids: frozenset[int]) -> EngineMatcher:
            return ScriptedMatcher(self._script, stop_token_ids)

        return CompiledGuide(new_matcher, memory_bytes=64 * (1 + len(self._script.allowed)))


class ScriptedMatcher(EngineMatcher):
    """One play of a script."""

    def __init__(self, script: Script, stop_token_ids: frozenset[int], position: int = 0) -> None:
        self._script = script
        self._stop_token_ids = stop_token_ids
        self._position = position

    def accept_token(self, token_id: int) -> bool:
        if token_id not in self._legal():
            return False
        self._position += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        self._position -= num_tokens

    def fill_next_token_bitmask(self, bitmask: NDArray[np.int32], index: int) -> None:
        if self._script.fill_delay_s > 0:
            time.sleep(self._script.fill_delay_s)
        if self._position == self._script.fail_at:
            raise RuntimeError(f"the script fails at position {self._position}")
        bitmask[index] = token_row(self._legal(), bitmask.shape[1] * 32)

    def is_terminated(self) -> bool:
        return self._position > len(self._script.allowed)

    def is_completed(self) -> bool:
        return self._position >= len(self._script.allowed)

    def forced_bytes(self) -> bytes:
        return b""  # a script knows tokens, not bytes

    def fork(self) -> ScriptedMatcher:
        return ScriptedMatcher(self._script, self._stop_token_ids, self._position)

    def _legal(self) -> frozenset[int]:
        if self._position == self._script.dead_end_at:
            return frozenset()
        if self._position >= len(self._script.allowed):
            return self._stop_token_ids
        return self._script.allowed[self._position] - self._stop_token_ids
