"""The order of sources in a step, and what becomes of their drafts."""

from collections.abc import Sequence

import pytest

from gkv_jax.drafts import ScriptedDrafts
from gkv_jax.drafts.backoff import PATIENCE
from gkv_jax.drafts.drafter import Drafter, Tally
from grammar_host import GuidedBatch

SLOT, ROOM = 0, 6


class FakeBatch(GuidedBatch):
    """A slot whose grammar forces what ``forced`` says after so many drafts, and refuses 99."""

    def __init__(self, forced: dict[int, list[int]] | None = None) -> None:
        super().__init__(1, ROOM, 100)
        self._forced, self._drafts = forced or {}, list[int]()

    def propose(self, slot: int, drafts: Sequence[int]) -> list[int]:
        self._drafts = []
        return self.extend(slot, drafts)

    def extend(self, slot: int, drafts: Sequence[int]) -> list[int]:
        usable = list(drafts)
        if 99 in usable:
            usable = usable[: usable.index(99)]
        self._drafts += usable
        return usable

    def forced(self, slot: int) -> list[int]:
        return self._forced.get(len(self._drafts), [])


def propose(drafter: Drafter, batch: FakeBatch, room: int = ROOM) -> list[tuple[int, str]]:
    drafter.propose(batch, SLOT, (), room)
    return list(zip(drafter.drafts, drafter.labels, strict=True))


class Ahead:
    """Proposes how many drafts are ahead, as often as there is room, up to ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most

    def propose(self, output: Sequence[int], ahead: Sequence[int], limit: int) -> Sequence[int]:
        return [len(ahead)] * min(limit, self._most - len(ahead))


def test_forced_tokens_first_then_the_first_source_that_has_a_guess() -> None:
    batch = FakeBatch({0: [7, 8]})
    sources = {"silent": ScriptedDrafts(()), "scripted": Ahead(9), "late": Ahead(9)}
    assert propose(Drafter("verify", sources), batch) == [
        (7, "forced"), (8, "forced"), *[(2, "scripted")] * 4
    ]  # fmt: skip
    assert propose(Drafter("off", sources), batch) == [(0, "scripted")] * 6


def test_the_grammar_goes_on_where_a_source_has_led() -> None:
    batch = FakeBatch({0: [7], 3: [8, 9]})
    assert propose(Drafter("verify", {"two": Ahead(3)}), batch) == [
        (7, "forced"), (1, "two"), (1, "two"), (8, "forced"), (9, "forced")
    ]  # fmt: skip


def test_what_the_grammar_refuses_is_cut_and_another_source_asked() -> None:
    class Wrong:
        def propose(self, output: Sequence[int], ahead: Sequence[int], limit: int) -> list[int]:
            return [5, 99, 5][:limit]

    class Illegal:
        def propose(self, output: Sequence[int], ahead: Sequence[int], limit: int) -> list[int]:
            return [99]

    drafted = propose(Drafter("off", {"wrong": Wrong()}), FakeBatch())
    assert drafted == [(5, "wrong")] * 6
    drafted = propose(Drafter("off", {"illegal": Illegal(), "other": Ahead(2)}), FakeBatch())
    assert drafted == [(0, "other")] * 2


@pytest.mark.parametrize("room", range(ROOM + 1))
def test_room_is_kept(room: int) -> None:
    batch = FakeBatch({0: [1, 2, 3]})
    assert len(propose(Drafter("verify", {"ahead": Ahead(9)}), batch, room)) == room


def test_the_draft_model_goes_on_where_nobody_else_has_a_guess() -> None:
    batch = FakeBatch({0: [7], 2: [8, 9]})
    drafter = Drafter("verify", uses_model=True)
    propose(drafter, batch)
    assert drafter.wants_model(ROOM)
    drafter.add_from_model(batch, SLOT, 40, ROOM)
    assert drafter.drafts == [7, 40, 8, 9]
    assert drafter.wants_model(ROOM)
    assert not drafter.wants_model(4)
    drafter.add_from_model(batch, SLOT, 99, ROOM)  # refused: the end of the drafts
    assert drafter.drafts == [7, 40, 8, 9]
    assert not drafter.wants_model(ROOM)
    drafter = Drafter("verify", {"ahead": Ahead(3)}, uses_model=True)
    propose(drafter, batch)
    assert not drafter.wants_model(ROOM)


def test_tallies_by_source() -> None:
    batch = FakeBatch({0: [7, 8]})
    drafter = Drafter("verify", {"ahead": Ahead(9)})
    propose(drafter, batch)
    assert drafter.observe(3) == {"forced": [True, True], "ahead": [True, False]}
    propose(drafter, batch)
    assert drafter.observe(0) == {"forced": [False]}  # of the others nobody knows
    propose(drafter, batch)
    assert drafter.observe(6) == {"forced": [True] * 2, "ahead": [True] * 4}
    assert drafter.tallies == {"forced": Tally(6, 4), "ahead": Tally(12, 5)}


def test_a_source_pauses_for_its_own_mistakes_only() -> None:
    def steps_with_source(accepted: int) -> int:
        drafter, count = Drafter("verify", {"ahead": Ahead(9)}), 0
        for _ in range(40):
            drafter.propose(FakeBatch({0: [7, 8]}), SLOT, (), ROOM)
            count += "ahead" in drafter.labels
            drafter.observe(accepted)
        return count

    assert steps_with_source(1) == 40  # the second forced token was wrong, nobody saw the source's
    assert PATIENCE < steps_with_source(2) < 10
    assert steps_with_source(3) == 40


def test_a_dropped_draft_is_no_proposal() -> None:
    drafter, batch = Drafter("off", {"ahead": Ahead(9)}), FakeBatch()
    propose(drafter, batch)
    drafter.drop(batch, SLOT)
    assert drafter.drafts == [] == drafter.labels
    assert drafter.observe(0) == {}
