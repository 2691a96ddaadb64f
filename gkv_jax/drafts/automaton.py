"""A suffix automaton over token ids: where did the end of this text occur before?

The automaton of a text has one state for every set of substrings that end at the same places. It is
built online in amortised constant time per token and has at most two states per token (Blumer et
al. 1985, "The smallest automaton recognizing the subwords of a text"). To draft from it is the idea
of SAM-Decoding (arXiv 2411.10666).
"""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

ROOT = 0
"""The state of the empty string."""
NONE = -1


class Cursor(NamedTuple):
    """A string that occurs in the automaton's text."""

    state: int
    """The state that the string leads to."""
    length: int
    """Tokens of the string."""
    end: int
    """Where one of its occurrences ends: ``tokens[end - length : end]`` is the string."""


class SuffixAutomaton:
    """All substrings of a growing text.

    Takes about 130 bytes per token of code, 300 at worst (a random text of two tokens): a state's
    first transition lies in arrays, and only a state with several has a dict.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        """Starts from a text; see ``extend``."""
        self.tokens: list[int] = []
        """The text."""
        self._last = ROOT
        """The state of the whole text."""
        # By state, int32: length of its longest string, where that ends, the state of its longest
        # suffix that also ends elsewhere, and the first transition's token and target.
        self._length = array("i")
        self._end = array("i")
        self._link = array("i")
        self._token = array("i")
        self._target = array("i")
        self._more: dict[int, dict[int, int]] = {}
        """The other transitions: target by token, by state."""
        self._add_state(length=0, end=0, link=NONE)
        for token in tokens:
            self.extend(token)

    def extend(self, token: int) -> None:
        """Appends a token id, at least 0, to the text. Amortised O(1)."""
        link, length = self._link, self._length
        if link[self._last] > ROOT:
            # What repeats at the end of the text has, from the next token on, its latest occurrence
            # here. Shorter suffixes are not told: that would make ``extend`` linear in loops.
            self._end[link[self._last]] = len(self.tokens)
        self.tokens.append(token)
        size = len(self.tokens)
        new = self._add_state(length=size, end=size, link=ROOT)
        state, self._last = self._last, new
        while state != NONE and (target := self._next(state, token)) == NONE:
            self._set(state, token, new)
            state = link[state]
        if state == NONE:
            return
        if length[target] == length[state] + 1:
            link[new] = target
            return
        # Only the shorter strings of ``target`` end here as well: they get a state of their own.
        clone = self._add_state(length[state] + 1, self._end[target], link[target])
        self._token[clone], self._target[clone] = self._token[target], self._target[target]
        if target in self._more:
            self._more[clone] = self._more[target].copy()
        while state != NONE and self._next(state, token) == target:
            self._set(state, token, clone)
            state = link[state]
        link[target] = link[new] = clone

    def repeat(self) -> Cursor:
        """The longest suffix of the text that also occurs earlier in it. O(1).

        ``end`` is that of its latest occurrence at which it was already the longest such suffix, or
        of its first where there is none: what followed lately is the better guess (up to 4 % fewer
        forward passes on code and CSV than with the first), and the latest of all is no better yet.
        """
        state = max(self._link[self._last], ROOT)
        return Cursor(state, self._length[state], self._end[state])

    def advance(self, cursor: Cursor, token: int) -> Cursor:
        """The longest suffix of the cursor's string plus ``token`` that occurs in the text.

        From ``repeat()`` on, it is the longest suffix of the text plus the tokens tried so far.
        The text stays as it is. Amortised O(1) over the tokens of a walk.
        """
        state, length, _ = cursor
        while (target := self._next(state, token)) == NONE:
            state = self._link[state]
            if state == NONE:
                return Cursor(ROOT, 0, 0)
            length = self._length[state]
        return Cursor(target, length + 1, self._end[target])

    def _add_state(self, length: int, end: int, link: int) -> int:
        self._length.append(length)
        self._end.append(end)
        self._link.append(link)
        self._token.append(NONE)
        self._target.append(NONE)
        return len(self._length) - 1

    def _next(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._target[state]
        more = self._more.get(state)
        return NONE if more is None else more.get(token, NONE)

    def _set(self, state: int, token: int, target: int) -> None:
        if self._token[state] in (NONE, token):
            self._token[state], self._target[state] = token, target
        else:
            self._more.setdefault(state, {})[token] = target
