"""What one request drafts in each step: its sources, one after the other, and what became of it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from gkv_jax.drafts.backoff import Backoff
from gkv_jax.drafts.source import DraftSource
from grammar_host import GuidedBatch

Jump = Literal["verify", "force", "off"]
"""What becomes of tokens that the grammar forces. ``verify``: they are drafts, and the model has the last
word about how the forced text is segmented. ``force``: they are the output. ``off``: nothing."""

FORCED, MODEL = "forced", "model"


@dataclasses.dataclass
class Tally:
    """Draft tokens of one source: how many the model verified, and how many of them it took."""

    proposed: int = 0
    accepted: int = 0


class Drafter:
    """The drafts of one request.

    In every step, tokens that the grammar forces come first. Then the first source that has a guess
    goes on, then the grammar again where it forces what follows, and so on while there is room. A draft
    model continues where the other sources have nothing to say.
    """

    def __init__(
        self,
        jump: Jump = "off",
        sources: Mapping[str, DraftSource] | None = None,
        *,
        uses_model: bool = False,
    ) -> None:
        """``sources`` by name, the most trusted first; ``uses_model`` if a draft model may go on."""
        self.jump, self.uses_model = jump, uses_model
        self.drafts: list[int] = []
        self.labels: list[str] = []
        """Where each of the drafts is from."""
        self.tallies: dict[str, Tally] = {}
        self._sources = dict(sources or {})
        self._backoffs = {name: Backoff() for name in (*self._sources, MODEL)}
        self._model_is_ready = False

    @property
    def may_draft(self) -> bool:
        """Whether it ever drafts anything."""
        return self.jump != "off" or bool(self._sources) or self.uses_model

    def propose(self, batch: GuidedBatch, slot: int, output: Sequence[int], room: int) -> None:
        """Choose the drafts of a step, at most ``room``, but for those of the draft model.

        Args:
          batch: knows the slot's grammar.
          slot: the request's.
          output: tokens generated so far.
          room: of the step.

        Raises:
          Exception: whatever a source raises.
        """
        self.drop(batch, slot)
        if room <= 0 or not self.may_draft:
            return
        ready = [name for name in self._sources if self._backoffs[name].ready()]
        self._model_is_ready = self.uses_model and self._backoffs[MODEL].ready()
        while True:
            before = len(self.drafts)
            self._add_forced(batch, slot, room)
            for name in ready if len(self.drafts) < room else ():
                guess = self._sources[name].propose(output, self.drafts, room - len(self.drafts))
                if self._add(batch, slot, guess, name, room):
                    break
            if len(self.drafts) == before or len(self.drafts) >= room:
                break
        if any(label != FORCED for label in self.labels):
            self._model_is_ready = False

    def wants_model(self, room: int) -> bool:
        """Whether the draft model shall continue the drafts of this step."""
        return self._model_is_ready and len(self.drafts) < room

    def add_from_model(self, batch: GuidedBatch, slot: int, token: int, room: int) -> None:
        """Take a token of the draft model, and what the grammar forces after it."""
        if not self._add(batch, slot, [token], MODEL, room):
            self._model_is_ready = False  # the end of the text, or of what is legal
            return
        self._add_forced(batch, slot, room)

    def drop(self, batch: GuidedBatch, slot: int) -> None:
        """Verify nothing in this step."""
        self.drafts, self.labels = [], []
        self._model_is_ready = False
        batch.propose(slot, [])

    def observe(self, accepted: int) -> dict[str, list[bool]]:
        """Count what was verified: the first ``accepted`` drafts were right.

        Returns:
          By source, for each of its drafts that could tell, whether it was right: those behind a wrong
          one cannot, whoever guessed it.
        """
        tried: dict[str, list[bool]] = {}
        for index, label in enumerate(self.labels):
            tally = self.tallies.setdefault(label, Tally())
            tally.proposed += 1
            tally.accepted += index < accepted
            if index <= accepted:
                tried.setdefault(label, []).append(index < accepted)
        for label, hits in tried.items():
            if label in self._backoffs:
                self._backoffs[label].observe(len(hits), sum(hits))
        return tried

    def _add_forced(self, batch: GuidedBatch, slot: int, room: int) -> None:
        if self.jump != "off" and len(self.drafts) < room:
            self._add(batch, slot, batch.forced(slot), FORCED, room)

    def _add(
        self, batch: GuidedBatch, slot: int, guess: Sequence[int], label: str, room: int
    ) -> bool:
        """Append what is usable of a guess; whether that is anything."""
        usable = batch.extend(slot, guess[: room - len(self.drafts)]) if len(guess) else []
        self.drafts += usable
        self.labels += [label] * len(usable)
        return bool(usable)
