"""Who is served when: prompts are read between steps, in order, and nobody stands still for long."""

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from gkv_jax import CacheSpec, DraftModel, Engine, Guide, Sampling
from gkv_jax.bridge import Session
from gkv_jax.cache import Cache, init_cache
from gkv_jax.decode import device_loop
from gkv_jax.prefill import Call, prefill_chunk, read_prompt, reading
from gkv_jax.request import Request, RequestCancelled
from gkv_jax.sampling import greedy_rows
from gkv_jax.text import TextStream
from tests.gkv_jax.engines import MODEL, PARAMS, SPEC, TOKENIZER, make_engine

LONG = "A prompt of many chunks, which the others that decode need not wait for. " * 4
SAMPLING = Sampling(max_tokens=12)


@pytest.fixture(scope="module")
def alone() -> tuple[int, ...]:
    """What follows ``LONG`` where nobody else is served."""
    with make_engine() as engine:
        return engine.generate(LONG, sampling=SAMPLING)[0].tokens


def start_endless(engine: Engine, prompt: str = "go") -> Request:
    """A request that decodes until it is cancelled."""
    request = engine.prepare(
        prompt, Guide.regex("[a-z]*X"), Sampling(max_tokens=10**6, temperature=0.0)
    )
    engine.submit(request)
    next(request.pieces())
    return request


def end(*requests: Request) -> None:
    for request in requests:
        request.cancel()
        request.result()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """``chunk`` for each part of a prompt that is read, and ``step`` for each step of the loop."""
    events: list[str] = []
    submit = Session.submit

    def reads(*args: Any, **kwargs: Any) -> Any:
        events.append("chunk")
        return prefill_chunk(*args, **kwargs)

    def steps(self: Session, sampled: np.ndarray) -> np.ndarray:
        events.append("step")
        return submit(self, sampled)

    monkeypatch.setattr("gkv_jax.prefill.prefill_chunk", reads)
    monkeypatch.setattr(Session, "submit", steps)
    return events


def on_step(monkeypatch: pytest.MonkeyPatch, react: Callable[[int], None]) -> None:
    """Call ``react`` with 0, 1, ... when a step's tokens arrive, before they are looked at."""
    submit, count = Session.submit, iter(range(10**9))

    def steps(self: Session, sampled: np.ndarray) -> np.ndarray:
        react(next(count))
        return submit(self, sampled)

    monkeypatch.setattr(Session, "submit", steps)


# What is being read lies still --------------------------------------------------------------------

POLICIES = {
    "window": SPEC,
    "h2o": CacheSpec(
        policy="h2o", sinks=2, kept=8, window=12, interval=4, prefill="chunks", max_drafts=1
    ),
    "tova": CacheSpec(policy="tova", sinks=2, kept=8, window=12, interval=4, prefill="chunks"),
    "quest, int8": CacheSpec(
        policy="quest", sinks=0, window=128, budget=16, page=4, prefill_chunk=32, dtype="int8"
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_steps_of_others_write_nothing_into_the_row_that_is_read(name: str) -> None:
    spec, tokens = POLICIES[name], TOKENIZER.encode(LONG)
    cache = init_cache(spec, MODEL, 4, np.dtype(np.float32))
    cache = read_prompt(PARAMS, cache, tokens[:40], 0, model=MODEL, spec=spec)
    calls = list(reading(PARAMS, tokens[:70], 1, model=MODEL, spec=spec))
    for call in calls[: len(calls) // 2]:
        cache = call.run(cache)
    session = Session(spec, 4, MODEL.vocab_size)
    request = Request(
        tuple(tokens[:41]), Sampling(max_tokens=20), frozenset(), TextStream(TOKENIZER)
    )
    session.admit(0, request)

    def rows(cache: Cache) -> list[list[np.ndarray]]:
        return [[np.asarray(leaf[row]) for leaf in jax.tree.leaves(cache)] for row in range(2)]

    before = rows(cache)
    cache = device_loop(
        PARAMS,
        cache,
        session.inputs(),
        session.positions(),
        greedy_rows(4),
        np.int32(session.handle),
        model=MODEL,
        spec=spec,
        head="masked",
    )
    after = rows(cache)
    assert len(request.result().tokens) == 20
    assert all(np.array_equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(before[0], after[0], strict=True))


# Turns ----------------------------------------------------------------------------------------------


def test_others_decode_between_the_chunks_of_a_long_prompt(
    engine: Engine, alone: tuple[int, ...], events: list[str]
) -> None:
    neighbours = [start_endless(engine), start_endless(engine, "on")]
    events.clear()
    (result,) = engine.generate(LONG, sampling=SAMPLING)
    assert all(neighbour.finish_reason is None for neighbour in neighbours)
    end(*neighbours)
    assert result.tokens == alone
    chunks = [at for at, event in enumerate(events) if event == "chunk"]
    assert len(chunks) == -(-(len(TOKENIZER.encode(LONG)) - 1) // SPEC.prefill_chunk)
    assert all("step" in events[a:b] for a, b in itertools.pairwise(chunks))


def test_a_slow_chunk_does_not_keep_the_next_one_waiting_for_long(
    engine: Engine, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading takes as long as it takes, a first compile say; the loop's turn has a limit."""
    run = Call.run

    def slow(call: Call, cache: Cache) -> Cache:
        time.sleep(0.2)
        return run(call, cache)

    monkeypatch.setattr(Call, "run", slow)
    monkeypatch.setattr("gkv_jax.scheduler.LONGEST_TURN_S", 0.0)
    neighbour = start_endless(engine)
    events.clear()
    engine.generate(LONG, sampling=SAMPLING)
    end(neighbour)
    chunks = [at for at, event in enumerate(events) if event == "chunk"]
    assert [b - a for a, b in itertools.pairwise(chunks)] == [2] * (
        len(chunks) - 1
    )  # one step each


def test_nobody_decodes_and_chunks_follow_each_other(engine: Engine, events: list[str]) -> None:
    engine.generate(LONG, sampling=Sampling(max_tokens=2))
    assert "step" not in events[: events.count("chunk")]


def test_short_prompts_that_fit_into_a_chunk_are_read_in_one_turn(
    engine: Engine, events: list[str]
) -> None:
    """Two of 32 tokens, padding included, take no longer than a chunk of 64."""
    neighbour = start_endless(engine)
    first, *shorts = (engine.prepare(p, sampling=SAMPLING) for p in (LONG[:65], "ab", "cd"))
    engine._scheduler.inbox.next_turn = float("inf")  # they come all before the next turn
    for request in (first, *shorts):
        engine.submit(request)
    events.clear()
    engine._scheduler.inbox.next_turn = 0.0
    assert all(request.result().error is None for request in (first, *shorts))
    end(neighbour)
    chunks = [at for at, event in enumerate(events) if event == "chunk"]
    assert len(chunks) == 3
    assert chunks[2] - chunks[1] == 1 < chunks[1] - chunks[0]


def test_a_draft_model_reads_between_steps_too(alone: tuple[int, ...], events: list[str]) -> None:
    draft = DraftModel(MODEL, PARAMS, TOKENIZER, SPEC)
    with make_engine(draft=draft) as engine:
        neighbour = start_endless(engine)
        events.clear()
        (result,) = engine.generate(LONG, sampling=SAMPLING)
        end(neighbour)
    assert result.tokens == alone
    assert result.stats["drafts"]["model"]["accepted"] > 0
    chunks = [at for at, event in enumerate(events) if event == "chunk"]
    assert len(chunks) == 2 * -(-(len(TOKENIZER.encode(LONG)) - 1) // SPEC.prefill_chunk)
    assert all("step" in events[a:b] for a, b in itertools.pairwise(chunks))


def test_a_prefix_is_read_and_shared_beside_others(engine: Engine, alone: tuple[int, ...]) -> None:
    neighbour = start_endless(engine)
    length = engine.share_prefix(LONG[:20])
    (result,) = engine.generate(LONG, sampling=SAMPLING)
    assert neighbour.finish_reason is None
    end(neighbour)
    engine.update_params(PARAMS)  # forgets it
    assert result.stats["prefix_tokens"] == length
    assert result.tokens == alone


# Order ----------------------------------------------------------------------------------------------


def test_a_long_prompt_is_served_under_a_flow_of_short_ones(
    engine: Engine, alone: tuple[int, ...]
) -> None:
    """Each short request that ends brings another one, and slots are given in the order of arrival."""
    requests: list[Request] = []
    long = engine.prepare(LONG, sampling=SAMPLING)
    flow_is_over = threading.Event()

    def submit_short() -> None:
        request = engine.prepare("short", sampling=Sampling(max_tokens=3, seed=len(requests)))
        request.sink = lambda piece: follow() if piece is None else None
        requests.append(request)
        engine.submit(request)

    def follow() -> None:
        if long.finish_reason is None and len(requests) < 300:
            submit_short()
        else:
            flow_is_over.set()

    for _ in range(2 * engine.slots):
        submit_short()
    requests.append(long)
    engine.submit(long)
    assert long.result().tokens == alone
    flow_is_over.wait()
    assert 2 * engine.slots + 1 < len(requests) < 300
    served = sorted((r for r in requests if r.admitted), key=lambda r: r.admitted)
    assert served == sorted(served, key=lambda r: r.submitted)
    for request in requests:
        request.result()


# Cancellation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["running", "reading", "waiting"])
def test_a_cancelled_request_is_gone_within_two_steps(
    engine: Engine, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled at a step with another error of its own; two steps later nothing is left of it."""
    others = [start_endless(engine) for _ in range(engine.slots - (state != "waiting"))]
    prompt = "short" if state == "running" else LONG
    victim = engine.prepare(prompt, Guide.regex("[a-z]*X"), Sampling(max_tokens=10**6))
    cancelled_at: list[int] = []
    left: list[tuple[int, int]] = []

    def is_in(state: str) -> bool:
        if state == "waiting":
            return engine.queued == 1
        if state == "reading":
            return engine._scheduler.inbox.reading is not None
        return bool(victim.tokens)

    def react(step: int) -> None:
        if not cancelled_at and is_in(state):
            cancelled_at.append(step)
            victim.cancel(TimeoutError("it took too long"))
            victim.cancel()  # the first counts
        elif cancelled_at and step == cancelled_at[0] + 2:
            left.append((engine.active, engine.queued))
            done.set()

    done = threading.Event()
    on_step(monkeypatch, react)
    engine.submit(victim)
    assert isinstance(victim.result().error, TimeoutError)
    done.wait()
    assert left == [(len(others), 0)]
    end(*others)


def test_a_prompt_whose_reading_was_cancelled_leaves_a_clean_row(
    engine: Engine, alone: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    neighbours = [start_endless(engine) for _ in range(2)]
    victim = engine.prepare(LONG[::-1])
    on_step(monkeypatch, lambda _: victim.cancel() if engine._scheduler.inbox.reading else None)
    engine.submit(victim)
    assert isinstance(victim.result().error, RequestCancelled)
    monkeypatch.undo()
    assert engine.generate(LONG, sampling=SAMPLING)[0].tokens == alone
    end(*neighbours)


def test_closing_ends_what_is_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine() as engine:
        start_endless(engine)
        request = engine.prepare(LONG)
        is_read = threading.Event()
        on_step(monkeypatch, lambda _: is_read.set() if engine._scheduler.inbox.reading else None)
        engine.submit(request)
        is_read.wait()
    error = request.result().error
    assert error is None or "closed" in str(error)


# Failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("takes_the_cache", [False, True])
def test_a_device_that_fails_at_a_chunk(
    engine: Engine,
    alone: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    takes_the_cache: bool,
) -> None:
    """Its request fails; the others only if the cache is lost. The engine serves on."""
    neighbour = start_endless(engine)

    def fails(params: Any, cache: Cache, *args: Any, **kwargs: Any) -> Any:
        if args[2] < SPEC.prefill_chunk:  # its first chunk is read
            return prefill_chunk(params, cache, *args, **kwargs)
        if takes_the_cache:
            for leaf in jax.tree.leaves(cache):
                leaf.delete()
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("gkv_jax.prefill.prefill_chunk", fails)
        waiting = engine.prepare("short", sampling=SAMPLING)
        failing = engine.prepare(LONG)
        engine.submit(failing)
        engine.submit(waiting)
        assert "out of memory" in str(failing.result().error)
        assert waiting.result().error is None
    if takes_the_cache:
        assert "out of memory" in str(neighbour.result().error)
    else:
        assert neighbour.finish_reason is None
        end(neighbour)
    assert engine.active == engine.queued == 0
    assert engine.generate(LONG, sampling=SAMPLING)[0].tokens == alone
