"""What every source of drafts has in common."""

from collections.abc import Sequence
from typing import Protocol

MIN_MATCH = 2
"""Tokens that must agree before a source proposes what followed them elsewhere.

Two instead of three: on source code, JSON and CSV it saved more forward passes (1.26 instead of
1.17 tokens per forward on code, 2.5 instead of 2.3 on JSON, 4 drafts). One would save a few more,
but nearly every step would then carry a guess, mostly wrong, and hide the sources after this one.
"""


class DraftSource(Protocol):
    """Proposes continuations of one request. Called on the loop's host side: NumPy and Python only."""

    def propose(self, output: Sequence[int], ahead: Sequence[int], limit: int) -> Sequence[int]:
        """Guesses what comes next.

        Args:
          output: the tokens generated so far; from call to call it only grows.
          ahead: drafts that are already chosen to follow ``output`` in this step.
          limit: the most tokens to return, at least 0.

        Returns:
          At most ``limit`` tokens that may follow ``output + ahead``; none is a fine answer.
        """
        ...
