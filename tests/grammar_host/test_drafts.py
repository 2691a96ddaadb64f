"""Drafts change how many steps a text takes, and nothing about the text."""

import dataclasses
import functools
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_host import (
    DeadEndError,
    GrammarMatcher,
    Guide,
    GuidedBatch,
    TokenizerInfo,
    bitmask_words,
)
from grammar_host.backends import SERVED_BACKENDS
from grammar_host.backends.scripted import Script
from grammar_host.reasoning import with_reasoning
from tests.grammar_host import common
from tests.grammar_host.common import STOP, VOCAB_SIZE, bits, legal, scripted_matcher, tokenize
from tests.grammar_host.vocabularies import canonical, tokenizer_info

DRAFTS = 4
OBJECT = {
    "type": "object",
    "properties": {"name": {"enum": ["the age", "the name"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
UNIQUE = {"type": "array", "items": {"enum": [True, False, None]}, "uniqueItems": True}
GUIDES = {
    "schema": (Guide.json_schema(OBJECT, max_whitespace=0), '{"name":"the name","age":12}'),
    "blanks": (Guide.regex(" {4}    x[0-9]+"), "        x12"),
}
LETTERS = Script.of([{97 + i, 65 + i} for i in range(8)])


@functools.cache
def compiled(engine, tokenizer, guide):
    return SERVED_BACKENDS[engine](tokenizer_info(tokenizer)).compile(guide)


def start(engine, guide, tokenizer="bytes"):
    """A generation inside one engine, with the tokenizer's segmentation of forced text."""
    info = tokenizer_info(tokenizer)
    matcher = compiled(engine, tokenizer, guide).new_matcher(frozenset(info.stop_token_ids))
    return GrammarMatcher(matcher, info.vocab_size, info.stop_token_ids, info.segmenter)


@functools.cache
def reasoning():
    info = common.tokenizer_info()
    return with_reasoning(
        compiled("xgrammar", "bytes", GUIDES["schema"][0]).new_matcher, info, "</think>"
    )


def start_reasoning():
    info = common.tokenizer_info()
    stops = frozenset(info.stop_token_ids)
    return GrammarMatcher(reasoning()(stops), VOCAB_SIZE, stops, info.segmenter)


@functools.cache
def unique_items():
    grammar = common.compiler().compile(Guide.json_schema(UNIQUE))
    assert not grammar.exact  # so a gate stands before the engine
    return grammar


BYTES = functools.partial(canonical, common.tokenizer_info())
CASES = {
    f"{engine}-{name}-{tokenizer}": (
        functools.partial(start, engine, guide, tokenizer),
        functools.partial(lambda t, text: canonical(tokenizer_info(t), text), tokenizer, text),
    )
    for engine in SERVED_BACKENDS
    for name, tokenizer in (("schema", "byte-level"), ("blanks", "bytes"))
    for guide, text in [GUIDES[name]]
} | {
    "gate": (lambda: unique_items().matcher(), lambda: BYTES("[true, false, null]")),
    "reasoning": (start_reasoning, lambda: BYTES("a</think>\n" + GUIDES["schema"][1])),
    "scripted": (lambda: scripted_matcher(LETTERS), lambda: [97, 66, 99]),
    "dead end": (
        lambda: scripted_matcher(Script(LETTERS.allowed, dead_end_at=5)),
        lambda: [97, 66, 99],
    ),
}
"""Matchers, and texts that lead through the interesting parts of their languages."""

every_engine = pytest.mark.parametrize("engine", SERVED_BACKENDS)


class Model:
    """What follows a text depends on its length and on what is legal there."""

    def __init__(self, wanted, picks):
        self._wanted, self._picks = wanted, picks

    def choose(self, position, options):
        pick = self._picks[position]
        if position < len(self._wanted) and self._wanted[position] in options and pick % 6:
            return self._wanted[position]
        return options[pick % len(options)]


def options_at(matcher, force):
    """The legal tokens, narrowed to the forced one; what a row is to be."""
    forced = matcher.forced_tokens() if force else []
    return forced[:1] or legal(matcher)


def write(matcher, model, force, limit):
    """The tokens that a loop without drafts writes."""
    tokens = []
    while len(tokens) < limit and not matcher.is_terminated():
        options = options_at(matcher, force)
        if not options:
            break
        tokens.append(model.choose(len(tokens), options))
        assert matcher.accept_token(tokens[-1])
    return tokens


def moved(matcher, tokens):
    for token in tokens:
        assert matcher.accept_token(token)
    return matcher


def cut(matcher, drafts, room):
    """The rules of `extend`, one token after the other."""
    usable, counted = [], Counter(drafts_proposed=len(drafts))
    counted["drafts_past_limit"] = max(0, len(drafts) - room)
    for index, token in enumerate(drafts[:room]):
        if token in matcher.stop_token_ids or matcher.is_terminated():
            counted["drafts_past_stop"] = min(len(drafts), room) - index
            break
        if not matcher.accept_token(token):
            counted["drafts_refused"] = min(len(drafts), room) - index
            break
        usable.append(token)
    counted["drafts_usable"] = len(usable)
    return usable, counted


def draw_drafts(data, following, stop, vocab_size):
    """Right ones, then perhaps wrong ones."""
    drafts = following[: data.draw(st.integers(0, DRAFTS + 1))]
    garbage = st.sampled_from([stop, -1, vocab_size]) | st.integers(0, vocab_size - 1)
    tail = data.draw(st.sampled_from(["none", "none", "changed", "garbage"]))
    if tail == "changed" and drafts:
        drafts[data.draw(st.integers(0, len(drafts) - 1))] = data.draw(garbage)
    elif tail == "garbage":
        drafts += data.draw(st.lists(garbage, max_size=3))
    return drafts


class Loop:
    """A batch of free text and one request, held against a fresh matcher at every call."""

    def __init__(self, new_matcher, force):
        self._new_matcher, self._force = new_matcher, force
        matcher = new_matcher()
        self.stops, self.vocab_size = matcher.stop_token_ids, matcher.vocab_size
        self.batch = GuidedBatch(2, DRAFTS, self.vocab_size)
        self.batch.admit(0, None)
        self.batch.admit(1, matcher, force=force)
        self.written: list[int] = []
        self.used: list[int] = []
        self.options: list[list[int]] = []  # of the rows filled in this step
        self.counted: Counter[str] = Counter()

    def probe(self, drafts=0):
        """A matcher that has seen the text and the first drafts, and nothing else."""
        return moved(self._new_matcher(), self.written + self.used[:drafts])

    def begin(self, n, drafts):
        self._end(matched=0)
        self.masks = np.full((2, n, bitmask_words(self.vocab_size)), 0x5A5A5A5A, np.int32)
        self.enabled = np.full((2, n), 77, np.int32)
        self._offer(self.batch.propose, drafts)

    def extend(self, drafts):
        self._offer(self.batch.extend, drafts)

    def forced(self):
        tokens = self.batch.forced(1)
        assert tokens == self.probe(len(self.used)).forced_tokens()
        return tokens

    def fill(self):
        self.counted["steps"] += not self.options
        self.batch.fill(self.masks, self.enabled)
        for row in range(len(self.options), len(self.used) + 1):
            self.counted["filled"] += 1
            options = options_at(self.probe(row), self._force)
            self.counted["dead_ends"] += not options and row > 0
            self.options.append(options or sorted(self.stops))
        for row, words in enumerate(self.masks[1]):
            assert list(bits(words)) == self.options[min(row, len(self.used))]
        assert np.all(self.masks[0] == -1)
        assert np.all(self.enabled == [[0], [1]])

    def advance(self, emitted):
        matched = 0
        while (
            matched < min(len(emitted), len(self.used)) and emitted[matched] == self.used[matched]
        ):
            matched += 1
        accepted = self.batch.advance(1, emitted)
        self._end(matched)
        self.written += emitted[:accepted]
        self.counted["accepted"] += accepted

    def check_counters(self):
        counters = self.batch.counters(1)
        assert counters.drafts_proposed == (
            counters.drafts_usable
            + counters.drafts_past_limit
            + counters.drafts_past_stop
            + counters.drafts_refused
        )
        found = dataclasses.asdict(counters)
        del found["fill_seconds"]
        assert found == {name: self.counted[name] for name in found}

    def _offer(self, call, drafts):
        usable, counted = cut(self.probe(len(self.used)), drafts, DRAFTS - len(self.used))
        assert call(1, drafts) == usable
        self.used += usable
        self.counted += counted

    def _end(self, matched):
        self.counted["advanced"] += len(self.used)
        self.counted["rolled_back"] += len(self.used) - matched
        self.used, self.options = [], []


@pytest.mark.thinned(2)
@pytest.mark.parametrize("force", [False, True], ids=["verify", "force"])
@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_any_drafts_give_the_text_of_no_drafts(name, force, seed, data):
    """Right ones, wrong ones and garbage, in any order of the calls that a step is made of."""
    new_matcher, text = CASES[name]
    limit = 16
    model = Model(text(), Random(seed).sample(range(10**6), limit + DRAFTS))
    straight = write(new_matcher(), model, force, limit)
    loop = Loop(new_matcher, force)

    def some(n):
        """Drafts for the place where the step stands; with few rows, no more than fit."""
        place = len(loop.written) + len(loop.used)
        right = straight[place:] if loop.written + loop.used == straight[:place] else []
        drafts = draw_drafts(data, right, STOP, loop.vocab_size)
        return drafts if n == 1 + DRAFTS else drafts[: n - 1 - len(loop.used)]

    while len(loop.written) < len(straight):
        n = data.draw(st.sampled_from([1 + DRAFTS, *range(1, 1 + DRAFTS)]))
        loop.begin(n, some(n))
        for call in data.draw(
            st.lists(st.sampled_from(["extend", "jump", "fill", "lose"]), max_size=5)
        ):
            if call == "extend":
                loop.extend(some(n))
            elif call == "jump":
                loop.extend(loop.forced()[: n - 1 - len(loop.used)])
            elif call == "fill":
                loop.fill()
            else:
                loop.begin(n, some(n))
        loop.fill()
        emitted = []
        for row, options in enumerate(loop.options):
            emitted.append(model.choose(len(loop.written) + row, options))
            if emitted[-1:] != loop.used[row : row + 1]:
                break
        loop.advance(emitted[: data.draw(st.sampled_from([n, n, n, *range(n)]))])
        if loop.batch.failure(1) is not None:
            break
    assert loop.written[:limit] == straight
    assert loop.batch.is_terminated(1) == loop.probe().is_terminated()
    if loop.batch.failure(1) is None:
        assert loop.batch.is_completed(1) == loop.probe().is_completed()
        loop.begin(1, [])
        loop.fill()
    if not options_at(loop.probe(), force):
        assert isinstance(loop.batch.failure(1), DeadEndError)
    else:
        assert loop.batch.failure(1) is None
    loop.check_counters()


def arrays(batch, n=None):
    slots, rows, words = batch.mask_shape
    n = n or rows
    return np.full((slots, n, words), 0x5A5A5A5A, np.int32), np.full((slots, n), 77, np.int32)


def rows_of(masks, slot=0):
    return [[int(token) for token in bits(row)] for row in masks[slot]]


@every_engine
def test_a_narrowed_row_depends_on_its_text_only(engine):
    """Two blanks are one token here, and only four tokens before the forced ones are looked at, so
    the third blank moves the boundaries: what was forced after the first is forced no more."""
    guide, blank = GUIDES["blanks"][0], ord(" ")
    before = moved(start(engine, guide), [blank] * 4)
    jump = before.forced_tokens()
    behind = moved(before.fork(), jump[:1])
    assert len(jump) == 3
    assert behind.forced_tokens() == []
    batch = GuidedBatch(1, 3, VOCAB_SIZE)
    batch.admit(0, before.fork(), force=True)
    assert batch.forced(0) == jump
    assert batch.propose(0, jump) == jump
    masks, enabled = arrays(batch)
    batch.fill(masks, enabled)
    assert rows_of(masks)[:2] == [jump[:1], legal(behind)]
    # Without drafts, one step after the other.
    assert batch.advance(0, []) == 0
    batch.fill(masks, enabled)
    assert rows_of(masks) == [jump[:1]] * 4
    assert batch.advance(0, jump[:1]) == 1
    batch.fill(masks, enabled)
    assert rows_of(masks) == [legal(behind)] * 4


def test_only_force_narrows_and_it_refuses_nothing():
    guide = GUIDES["schema"][0]
    batch = GuidedBatch(3, 1, VOCAB_SIZE)
    for slot, force in enumerate([False, True]):
        batch.admit(slot, start("xgrammar", guide), force=force)
    batch.admit(2, None, force=True)
    forced = batch.forced(1)
    assert batch.forced(0) == forced == start("xgrammar", guide).forced_tokens()
    assert forced[:1] == tokenize('{"')
    masks, enabled = arrays(batch)
    batch.fill(masks, enabled)
    assert rows_of(masks, 0)[0] == sorted([ord("{"), forced[0]])
    assert rows_of(masks, 1)[0] == forced[:1]
    assert np.all(masks[2] == -1)
    for slot in (0, 1):
        assert batch.advance(slot, [ord("{")]) == 1
        assert batch.failure(slot) is None


@pytest.mark.parametrize("n", [3, 4])
def test_a_draft_model_gets_each_row_once(n):
    """It draws its next token under the row after the drafts so far; the other slots wait."""
    batch = GuidedBatch(3, 3, VOCAB_SIZE)
    filled = Counter()
    for slot in (0, 1):
        matcher = scripted_matcher(LETTERS)
        engine_fill = matcher._engine.fill_next_token_bitmask

        def counting(masks, index, slot=slot, engine_fill=engine_fill):
            filled[slot, index] += 1
            engine_fill(masks, index)

        matcher._engine.fill_next_token_bitmask = counting
        batch.admit(slot, matcher)
    batch.admit(2, None)
    masks, enabled = arrays(batch, n)
    batch.propose(1, [97, 66])
    batch.propose(2, [5])
    drafts = []
    for _ in range(2):
        batch.fill(masks, enabled)
        drafts += batch.extend(0, rows_of(masks)[len(drafts)][:1])
    batch.fill(masks, enabled)
    assert drafts == [65, 66]
    assert batch.extend(2, [6]) == [6]
    for slot in (0, 1):
        assert rows_of(masks, slot) == [[65, 97], [66, 98], *[[67, 99]] * (n - 2)]
        assert batch.counters(slot).filled == 3
        assert batch.counters(slot).steps == 1
    assert batch.counters(2).steps == 1
    assert filled == {(slot, slot * n + row): 1 for slot in (0, 1) for row in range(3)}
    assert batch.advance(0, [65, 66, 99]) == 3
    assert batch.advance(1, [97, 98]) == 2
    assert batch.counters(0).rolled_back == 0
    assert batch.counters(1).rolled_back == 1


def test_masks_that_are_too_narrow_for_a_slot_are_refused():
    batch = GuidedBatch(2, 2, VOCAB_SIZE)
    batch.admit(0, scripted_matcher(LETTERS))
    batch.admit(1, None)
    batch.propose(1, [5])
    masks, enabled = arrays(batch, 1)
    batch.fill(masks, enabled)
    assert "masks must be (2, 3, " in str(batch.failure(0))
    assert np.all(masks == 0x5A5A5A5A)


@pytest.mark.parametrize("is_filled", [False, True])
def test_behind_a_dead_end_there_are_no_drafts(is_filled):
    batch = GuidedBatch(1, 4, VOCAB_SIZE)
    batch.admit(0, scripted_matcher(Script(LETTERS.allowed, dead_end_at=2)))
    masks, enabled = arrays(batch)
    assert batch.propose(0, [97, 98]) == [97, 98]
    if is_filled:
        batch.fill(masks, enabled)
        assert batch.counters(0).dead_ends == 1
    assert batch.forced(0) == []
    assert batch.extend(0, [99, 100]) == []
    batch.fill(masks, enabled)
    assert rows_of(masks) == [[65, 97], [66, 98], *[[STOP]] * 3]
    counters = batch.counters(0)
    assert (counters.dead_ends, counters.drafts_refused, counters.filled) == (1, 2, 3)
    assert batch.failure(0) is None
    assert batch.advance(0, [97, 66]) == 2
    assert batch.failure(0) is None


def test_a_dead_end_is_forgotten_with_the_drafts_before_it():
    """Nothing of the vocabulary can follow "nb", but the model writes "na"."""
    nb, na, me = range(3)
    info = TokenizerInfo.from_vocabulary([b"nb", b"na", b"me", b""], [3])
    grammar = SERVED_BACKENDS["xgrammar"](info).compile(Guide.choice(["nbx", "namema", "nameme"]))
    matcher = GrammarMatcher(grammar.new_matcher(frozenset({3})), 4, [3], info.segmenter)
    batch = GuidedBatch(1, 2, 4)
    batch.admit(0, matcher)
    masks, enabled = arrays(batch)
    assert batch.propose(0, [nb]) == [nb]
    batch.fill(masks, enabled)
    assert rows_of(masks) == [[nb, na], [3], [3]]
    assert batch.advance(0, [na]) == 1
    assert batch.advance(0, [me, me]) == 2
    assert batch.failure(0) is None
    assert batch.is_completed(0)


def test_where_nothing_is_forced_and_nothing_usable():
    guide = Guide.choice(["ab"])
    batch = GuidedBatch(3, 2, VOCAB_SIZE)
    batch.admit(0, None)
    for slot in (1, 2):
        batch.admit(slot, start("xgrammar", guide))
        assert batch.forced(slot) == tokenize("ab")
    assert batch.advance(1, [*tokenize("ab"), STOP]) == 2
    assert batch.is_terminated(1)
    assert batch.advance(2, [ord("x")]) == 0
    assert batch.failure(2) is not None
    for slot in range(3):
        assert batch.forced(slot) == []
    assert batch.extend(0, [1, VOCAB_SIZE, 2]) == [1]
    assert batch.counters(0).drafts_refused == 1
    assert batch.propose(1, [97, 98, 99]) == batch.extend(1, [97]) == []
    counters = batch.counters(1)
    assert (counters.drafts_past_limit, counters.drafts_past_stop) == (1, 3)
    assert batch.extend(2, [97]) == []
    assert batch.counters(2).drafts_proposed == 0


@pytest.mark.parametrize("moment", ["forced", "extend", "fill"])
def test_an_engine_that_breaks_amid_a_step_fails_its_slot(moment):
    def broken(*_):
        raise OSError("broke")

    batch = GuidedBatch(1, 3, VOCAB_SIZE)
    matcher = start("xgrammar", GUIDES["schema"][0])
    batch.admit(0, matcher, force=True)
    masks, enabled = arrays(batch)
    first = tokenize('{"')
    assert batch.propose(0, first) == first
    batch.fill(masks, enabled)
    if moment == "extend":
        matcher.accept_token = broken
        assert batch.extend(0, tokenize("name")) == []
    elif moment == "forced":
        matcher.forced_tokens = broken
        batch.extend(0, tokenize("name"))
        assert batch.forced(0) == []
    else:
        batch.extend(0, tokenize("name"))
        matcher.forced_tokens = broken
    matcher.rollback = broken  # and whatever the engine does from now on
    batch.fill(masks, enabled)
    assert isinstance(batch.failure(0), OSError)
    assert rows_of(masks) == [[STOP]] * 4
    assert batch.forced(0) == batch.propose(0, first) == batch.extend(0, first) == []
    assert batch.advance(0, first) == 0


def test_a_slot_that_fails_amid_its_drafts_keeps_none_of_them():
    """So that the others' masks may be as narrow as their own drafts allow."""
    batch = GuidedBatch(2, 2, VOCAB_SIZE)
    for slot in range(2):
        batch.admit(slot, matcher := scripted_matcher(LETTERS))
    accept = matcher.accept_token
    matcher.accept_token = lambda token: accept(token) and 1 // (token - 98) != 0
    assert batch.propose(1, [97, 98]) == []
    masks, enabled = arrays(batch, 1)
    batch.fill(masks, enabled)
    assert batch.failure(0) is None
    assert isinstance(batch.failure(1), ZeroDivisionError)
    assert rows_of(masks, 1) == [[STOP]]
