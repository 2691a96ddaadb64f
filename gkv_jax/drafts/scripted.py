"""Drafts written down beforehand."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class ScriptedDrafts:
    """Proposes the tokens of a prediction of the whole output, by position.

    Where the output has already left the prediction the guesses are simply rejected.
    """

    prediction: tuple[int, ...]

    def propose(self, output: Sequence[int], ahead: Sequence[int], limit: int) -> Sequence[int]:
        """See ``DraftSource``."""
        start = len(output) + len(ahead)
        return self.prediction[start : start + limit]
