"""Where draft tokens come from.

A draft is a guess that one forward pass verifies together with the token before it. Guesses never
change the output, only the number of forward passes, so a source may propose anything.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol


class DraftSource(Protocol):
    """Proposes continuations of one request. Called on the loop's host side: NumPy and Python only."""

    def propose(self, output: Sequence[int], limit: int) -> Sequence[int]:
        """At most ``limit`` tokens that may follow ``output``, the tokens generated so far."""
        ...


@dataclasses.dataclass(frozen=True)
class ScriptedDrafts:
    """Proposes the tokens of a prediction of the whole output, by position.

    Where the output has already left the prediction the guesses are simply rejected.
    """

    prediction: tuple[int, ...]

    def propose(self, output: Sequence[int], limit: int) -> Sequence[int]:
        """See ``DraftSource``."""
        return self.prediction[len(output) : len(output) + limit]
