"""A source that guesses wrong is asked less often."""

PATIENCE = 4
"""Proposals in a row of which nothing was right, before the first pause: right guesses come in runs, and
a source that pauses at once misses them."""

MAX_PAUSE = 32
"""Steps that a source sits out at most before it is asked again."""


class Backoff:
    """Throttles one source of drafts of one request; deterministic.

    After ``PATIENCE`` proposals in a row of which nothing was accepted the source sits out one step,
    after the next two, then four, and so on up to ``MAX_PAUSE``; any accepted draft ends that. So a
    source that is always wrong is asked in about one step of 33.
    """

    def __init__(self) -> None:
        self._pause = 0
        """Steps that the source still has to sit out."""
        self._failures = 0
        """Proposals since the last of which a token was accepted."""

    def ready(self) -> bool:
        """Whether to ask the source in this step. To be called once per step: it counts them."""
        if self._pause:
            self._pause -= 1
            return False
        return True

    def observe(self, proposed: int, accepted: int) -> None:
        """Takes note of how many tokens the source proposed in a step, and how many were right.

        A step without a proposal changes nothing.
        """
        if accepted:
            self._pause = self._failures = 0
        elif proposed:
            self._failures += 1
            beyond = self._failures - PATIENCE
            self._pause = 0 if beyond < 0 else min(1 << min(beyond, 16), MAX_PAUSE)
