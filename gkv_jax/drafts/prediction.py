"""Drafts from a prediction of the output: most of it is known, as when a file is edited."""

from collections.abc import Sequence

import numpy as np

from gkv_jax.drafts.source import MIN_MATCH
from gkv_jax.errors import UserError

MAX_PREDICTION_TOKENS = 32_768

MAX_MATCH = 16
"""Tokens by which places are told apart; it bounds the search in a prediction that repeats itself."""


class PredictedDrafts:
    """Proposes the tokens of a prediction, and finds its place again after an edit.

    While the output follows the prediction, what comes next is proposed by position. After a
    departure (an insertion, a deletion, a replaced word) the place is where the longest suffix of
    the output occurs, at least ``MIN_MATCH`` tokens; of several such places the nearest one at or
    after the departure, else the nearest one before it. The nearest instead of the first made up to
    28 % more tokens per forward (JSON with deleted lines, 8 drafts). A suffix automaton knows one
    place per string, so NumPy searches the whole prediction instead; only departures pay for that.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        """Keeps the tokens of a prediction of the whole output.

        Raises:
          UserError: the prediction has no tokens, or more than ``MAX_PREDICTION_TOKENS``.
        """
        if not prediction:
            raise UserError("sampling.prediction is empty: leave it out (None) or give some text")
        if len(prediction) > MAX_PREDICTION_TOKENS:
            raise UserError(
                f"sampling.prediction has {len(prediction)} tokens, at most "
                f"{MAX_PREDICTION_TOKENS} are allowed: shorten it or leave it out"
            )
        self._prediction = tuple(prediction)
        self._array = np.array(prediction, np.int32)
        self._seen = 0
        """Tokens of the output that have been compared."""
        self._shared = 0
        """Where in the prediction the last token ends that the output was seen to follow."""
        self._place: int | None = 0
        """Where in the prediction the next token is expected; None while that is unknown."""

    def propose(self, output: Sequence[int], ahead: Sequence[int], limit: int) -> Sequence[int]:
        """See ``DraftSource``. O(new tokens), and after a departure O(tokens of the prediction)."""
        for token in output[self._seen :]:
            self._place = self._follow(self._place, token)
            if self._place is not None:
                self._shared = self._place
        if self._place is None and len(output) > self._seen:
            self._place = self._find(output[-MAX_MATCH:])
        self._seen = len(output)
        place = self._place
        for token in ahead:
            place = self._follow(place, token)
        if place is None and ahead:
            place = self._find([*output[-MAX_MATCH:], *ahead][-MAX_MATCH:])
        return () if place is None else self._prediction[place : place + limit]

    def _follow(self, place: int | None, token: int) -> int | None:
        """The place after ``token``, if the prediction has it at ``place``."""
        if place is None or self._prediction[place : place + 1] != (token,):
            return None
        return place + 1

    def _find(self, suffix: Sequence[int]) -> int | None:
        """Where the longest end of ``suffix`` ends in the prediction, if that is long enough."""
        ends = np.flatnonzero(self._array == suffix[-1]) + 1
        if not len(ends):
            return None
        length = 1
        for token in reversed(suffix[:-1]):  # each round keeps the ends that match one more token
            longer = ends[ends > length]
            longer = longer[self._array[longer - length - 1] == token]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if length < MIN_MATCH:
            return None
        after = ends[ends >= self._shared]
        return int(after[0] if len(after) else ends[-1])
