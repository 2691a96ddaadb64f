"""Which of the compiled loops runs: by what is proposed, and by what their steps have been seen to cost.

On accelerators a step of N tokens takes hardly longer than one of a single token, so drafts cost
nothing. On CPUs, or in large batches, it may take several times as long, and a draft in one row of
many does not pay. Nobody can tell but by looking at the clock.
"""

import collections
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

Program = Literal["narrow", "wide", "drafting"]
"""``narrow``: one token per row. ``wide``: N, drafts among them. ``drafting``: besides, the passes of a
draft model."""

Verify = Literal["faster", "always"]
"""When drafts are verified: ``faster``, where measured times say that it pays; ``always``."""

SWITCH_SECONDS = 1e-3
"""What leaving one loop for another costs."""

_SAMPLES = 15
_ENOUGH = 3
_MEMORY = 0.05  # weight of the latest step in a source's rate of acceptance
_FIRST_RATE = {"forced": 0.95}
_ANY_RATE = 0.6


class Widths:
    """Remembers times and rates of acceptance, and chooses the program of the next step."""

    def __init__(self, verify: Verify = "faster") -> None:
        """See ``Verify``."""
        self._verify = verify
        self._seconds: dict[Program, collections.deque[float]] = {
            program: collections.deque(maxlen=_SAMPLES)
            for program in ("narrow", "wide", "drafting")
        }
        self._rates: dict[str, float] = {}
        self._lost = 0.0

    def observe_step(self, program: Program, seconds: float) -> None:
        """A step of ``program`` took so long."""
        self._seconds[program].append(seconds)

    def observe_drafts(self, source: str, proposed: int, accepted: int) -> None:
        """So many drafts of a source were verified and accepted in a row's step."""
        rate = self.rate(source)
        self._rates[source] = rate + _MEMORY * (accepted / proposed - rate)

    def rate(self, source: str) -> float:
        """The chance that a draft of ``source`` is accepted."""
        return self._rates.get(source, _FIRST_RATE.get(source, _ANY_RATE))

    def choose(
        self,
        present: Program | None,
        proposals: Sequence[Sequence[str]],
        rooms_for_model: Sequence[int] = (),
    ) -> Program:
        """The program of the next step.

        Args:
          present: the one that runs; None between loops.
          proposals: for each active row, the sources of its drafts in their order.
          rooms_for_model: for each of them, how many tokens the draft model may add.
        """
        tokens: dict[Program, float] = {"narrow": float(len(proposals))}
        rooms = list(rooms_for_model) or [0] * len(proposals)
        if any(proposals):
            tokens["wide"] = sum(map(self._expected, proposals))
        if any(rooms):
            longer = [
                [*labels, *["model"] * room] for labels, room in zip(proposals, rooms, strict=True)
            ]
            tokens["drafting"] = sum(map(self._expected, longer))
        best = self._best(tokens)
        self._lost += self._loss(present, best, tokens)
        if self._lost <= SWITCH_SECONDS and present is not None:
            return present
        self._lost = 0.0
        return best

    def _loss(
        self, present: Program | None, best: Program, tokens: Mapping[Program, float]
    ) -> float:
        """Seconds that a step of ``present`` loses against ``best``.

        As in renting skis, a loop is left when staying has lost as much as leaving costs.
        """
        if present is None or present == best:
            self._lost = 0.0
            return 0.0
        cost, least = self._cost(present), self._cost(best)
        if self._verify == "always" or cost is None or least is None:
            return math.inf
        brings = tokens.get(present, tokens["narrow"])
        return max(0.0, cost - brings * least / tokens[best])

    def _best(self, tokens: Mapping[Program, float]) -> Program:
        order: tuple[Program, ...] = ("drafting", "wide", "narrow")
        candidates = [program for program in order if program in tokens]
        if self._verify == "always":
            return candidates[0]
        for program in candidates:
            if self._cost(program) is None:
                return program

        def speed(program: Program) -> float:
            return tokens[program] / (self._cost(program) or 1.0)

        return max(candidates, key=speed)

    def _cost(self, program: Program) -> float | None:
        samples = self._seconds[program]
        return statistics.median(samples) if len(samples) >= _ENOUGH else None

    def _expected(self, labels: Sequence[str]) -> float:
        """Tokens that a row's step is expected to bring."""
        expected = chance = 1.0
        for label in labels:
            chance *= self.rate(label)
            expected += chance
        return expected
