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

PROBE_EVERY = 200
"""Steps whose drafts did not seem to pay, until one is verified all the same."""

_WIDEST_FIRST: tuple[Program, ...] = ("drafting", "wide", "narrow")
_SAMPLES = 15
_ENOUGH = 3
_MEMORY = 0.03  # weight of the latest draft in the rate at which a source is right
_FIRST_RATE = {"forced": 0.95}
_ANY_RATE = 0.7


class Widths:
    """Remembers times and how often drafts were right, and chooses the program of the next step."""

    def __init__(self, verify: Verify = "faster") -> None:
        """See ``Verify``."""
        self._verify = verify
        self._seconds: dict[Program, collections.deque[float]] = {
            program: collections.deque(maxlen=_SAMPLES)
            for program in ("narrow", "wide", "drafting")
        }
        self._rates: dict[str, float] = {}
        self._lost = 0.0
        self._declined = 0

    def observe_step(self, program: Program, seconds: float) -> None:
        """A step of ``program`` took so long."""
        self._seconds[program].append(seconds)

    def observe_drafts(self, source: str, tried: Sequence[bool]) -> None:
        """Of drafts of a source that were verified, whether each was right."""
        for is_right in tried:
            rate = self.rate(source)
            self._rates[source] = rate + _MEMORY * (is_right - rate)

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
        if best == "narrow" and len(tokens) > 1:
            # What is never verified can never turn out to be right, or cheap.
            self._declined += 1
            if self._declined == PROBE_EVERY:
                self._declined = 0
                return next(program for program in _WIDEST_FIRST if program in tokens)
        loss = self._loss(present, best, tokens)
        self._lost = 0.0 if present == best else self._lost + loss
        if present is not None and self._lost <= SWITCH_SECONDS:
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
            return 0.0
        if self._verify == "always":
            return math.inf
        cost, least = self._cost(present), self._cost(best)
        if cost is None:
            return 0.0  # stay until it is known
        if least is None:
            return math.inf
        brings = tokens.get(present, tokens["narrow"])
        return max(0.0, cost - brings * least / tokens[best])

    def _best(self, tokens: Mapping[Program, float]) -> Program:
        candidates = [program for program in _WIDEST_FIRST if program in tokens]
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
