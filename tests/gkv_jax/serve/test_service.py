"""Who is let in: a bounded queue, limits of time, and the order of those who wait."""

import concurrent.futures
import threading
from typing import Any

import openai
import pytest

from gkv_jax.serve import chats
from gkv_jax.serve.errors import ApiError
from gkv_jax.serve.service import Admission, Places
from gkv_jax.serve.tools import Conversation
from tests.gkv_jax.serve.conftest import LIMITS, MODEL, Served, serving, tiny_engine, wait_for
from tests.gkv_jax.serve.test_chat import ENDLESS, schema_format

LONG: dict[str, Any] = {"max_tokens": 20_000, "response_format": schema_format(ENDLESS)}


def test_places_are_as_many_as_slots_and_waiting() -> None:
    admission = Admission(slots=2, size=3)
    admission.enter(5)
    with pytest.raises(ApiError) as full:
        admission.enter(1)
    assert (full.value.status, full.value.code) == (429, "queue_full")
    assert full.value.headers is not None
    assert 1 <= int(full.value.headers["Retry-After"]) <= 60
    admission.leave(1)
    admission.enter(1)


def test_places_that_no_request_took_over_are_given_back() -> None:
    admission = Admission(slots=2, size=0)
    with pytest.raises(RuntimeError), Places(admission, 2):
        raise RuntimeError("on the way")
    with Places(admission, 2) as places:
        places.hand_over()
    with pytest.raises(ApiError), Places(admission, 1):  # they are the requests' now
        pass
    admission.leave(2)
    admission.enter(2)


def test_more_answers_than_there_are_places_never_fit() -> None:
    """Waiting would not help: no 429."""
    with tiny_engine(slots=1) as engine, serving(engine, LIMITS, queue_size=2) as served:
        with pytest.raises(openai.BadRequestError, match="takes 3 answers") as raised:
            served.client.completions.create(model=MODEL, prompt=["a"] * 4, max_tokens=1)
        assert raised.value.param == "prompt"
        served.client.completions.create(model=MODEL, prompt=["a"] * 3, max_tokens=1)
        with pytest.raises(openai.BadRequestError, match="takes 3 answers") as raised:
            served.chat(n=4)
        assert raised.value.param == "n"


def test_retry_after_grows_with_what_answers_take() -> None:
    quick, slow = Admission(1, 0), Admission(1, 0)
    for _ in range(50):
        quick.observe(0.1)
        slow.observe(20.0)
    advice = []
    for admission in (quick, slow):
        admission.enter(1)
        with pytest.raises(ApiError) as full:
            admission.enter(1)
        assert full.value.headers is not None
        advice.append(int(full.value.headers["Retry-After"]))
    assert advice == [1, 20]


def test_a_full_queue_is_a_429_and_disturbs_nobody() -> None:
    with tiny_engine(slots=1) as engine, serving(engine, LIMITS, queue_size=1) as served:
        first = served.chat(stream=True, **LONG)
        next(first)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            second = pool.submit(served.chat, max_tokens=2)
            wait_for(lambda: engine.queued == 1)
            with pytest.raises(openai.RateLimitError) as full:
                served.chat()
            assert int(full.value.response.headers["Retry-After"]) >= 1
            assert full.value.type == "rate_limit_error"
            first.close()
            assert second.result().choices
        # Those who were refused or left hold no places.
        assert served.chat(max_tokens=2).choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_when_its_time_is_over(served: Served, stream: bool) -> None:
    with pytest.raises(openai.APIError) as raised:
        list(served.chat(stream=stream, extra_body={"timeout": 0.5}, **LONG))
    assert raised.value.code == "request_timeout"
    wait_for(lambda: served.free_slots == served.engine.slots)


def test_time_spent_waiting_for_a_slot_counts() -> None:
    with tiny_engine(slots=1) as engine, serving(engine, LIMITS) as served:
        first = served.chat(stream=True, **LONG)
        next(first)
        with pytest.raises(openai.APIStatusError) as raised:
            served.chat(max_tokens=2, extra_body={"timeout": 0.2})
        assert raised.value.status_code == 504
        wait_for(lambda: engine.queued == 0)  # the engine notices between two steps
        first.close()


def test_a_slow_guide_keeps_nobody_waiting(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one client's guide is compiled, others' requests come and go."""
    release: concurrent.futures.Future[Any] = concurrent.futures.Future()
    held = threading.Semaphore(0)
    compiler = served.engine.compiler
    submit = compiler.submit

    def slow(guide: Any, backend: str | None = None) -> Any:
        if guide.kind != "regex":
            return submit(guide, backend)
        held.release()
        return release

    monkeypatch.setattr(compiler, "submit", slow)
    grammar = served.engine.compiler.compile
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        waiting = [pool.submit(served.chat, extra_body={"regex": "a{3}"}) for _ in range(60)]
        assert all(held.acquire(timeout=30) for _ in waiting)
        assert served.chat(max_tokens=3).choices
        monkeypatch.undo()
        from grammar_host import Guide

        release.set_result(grammar(Guide.regex("a{3}")))
        assert {one.result().choices[0].message.content for one in waiting} == {"aaa"}


def test_nothing_is_read_before_there_is_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations and schemas may be large; whoever is refused costs nothing."""
    read: list[Any] = []

    class Watched(Conversation):
        @classmethod
        def of(cls, *args: Any, **options: Any) -> Any:
            read.append(args)
            return Conversation.of(*args, **options)

    monkeypatch.setattr(chats, "Conversation", Watched)
    with tiny_engine(slots=1) as engine, serving(engine, LIMITS, queue_size=0) as served:
        first = served.chat(stream=True, **LONG)
        next(first)
        assert len(read) == 1
        with pytest.raises(openai.RateLimitError):
            served.chat()
        with pytest.raises(openai.RateLimitError):
            served.client.responses.create(model=MODEL, input="hi", store=False)
        assert len(read) == 1
        first.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]},
        {"messages": [{"role": "tool", "content": "a", "tool_call_id": "nowhere"}]},
        {"extra_body": {"regex": "("}},
        {"extra_body": {"cache": {"window": 7}}},
    ],
)
def test_who_is_refused_on_the_way_holds_no_place(fields: dict[str, Any]) -> None:
    with tiny_engine(slots=1) as engine, serving(engine, LIMITS, queue_size=0) as served:
        with pytest.raises(openai.BadRequestError):
            served.chat(**fields)
        assert served.chat(max_tokens=2).choices
