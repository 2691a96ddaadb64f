"""The engine and its loop on a random tiny model, with scripted grammars where a real one is not it."""

import dataclasses
import gc
import itertools
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gkv_jax import CacheSpec, Engine, Guide, Sampling, ScriptedDrafts, UserError
from gkv_jax.bridge import GrammarTimeout, Session
from gkv_jax.errors import EngineClosedError, EngineFailedError
from gkv_jax.models.llama import Llama
from gkv_jax.request import RequestCancelled
from grammar_host import DeadEndError, GrammarMatcher
from grammar_host.backends.scripted import Script, ScriptedBackend
from tests.gkv_jax.engines import CONFIG, MODEL, PARAMS, SPEC, TOKENIZER, make_engine
from tests.gkv_jax.tiny import STOP, random_params, text_config

ROOT = Path(__file__).parent.parent.parent
LONG = "A long prompt, longer than the window, so that prefill and ring have to turn around. " * 2


def tokens(text: str) -> list[int]:
    return list(TOKENIZER.encode(text))


LETTERS = tokens("abcdefghijklmnopqrstuvwxyz")
WORK: list[tuple[str, Guide | None, Sampling]] = [
    ("Once", None, Sampling(max_tokens=30)),
    (LONG, Guide.regex(r"[a-z]{3,12}( [a-z]{3,12}){2}\."), Sampling(max_tokens=60)),
    ("x", Guide.choice(["yes", "no", "perhaps"]), Sampling(max_tokens=30)),
    ("Name:", Guide.regex("[A-Z][a-z]{2,8}"), Sampling(max_tokens=30, temperature=1.3, seed=4)),
    ("Say", None, Sampling(max_tokens=25, temperature=0.9, top_k=40, top_p=0.95, seed=7)),
    (LONG[5:], Guide.json_schema({"enum": [1, "two", None]}), Sampling(max_tokens=30)),
    ("One more", Guide.regex(r"\d{1,5}"), Sampling(max_tokens=30, temperature=2.0, seed=1)),
]


@pytest.fixture(scope="module")
def alone(engines: Callable[[str], Engine]) -> list[tuple[tuple[int, ...], str, str]]:
    """Each request of ``WORK`` with nobody beside it."""
    out = []
    for prompt, guide, sampling in WORK:
        (result,) = engines("host").generate(prompt, guide=guide, sampling=sampling)
        out.append((result.tokens, result.text, result.finish_reason))
    return out


def run(engine: Engine, order: Sequence[int], drafts: Any = None, **options: Any) -> list[Any]:
    return engine.generate(
        [WORK[i][0] for i in order],
        guide=[WORK[i][1] for i in order],
        sampling=[dataclasses.replace(WORK[i][2], **options) for i in order],
        drafts=drafts,
    )


# Batches ----------------------------------------------------------------------------------------


def test_a_mixed_batch_equals_each_row_alone(engine: Engine, alone: list[Any]) -> None:
    """Guided and free rows, seven requests over four slots, in several orders; both drivers."""
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(len(WORK)).tolist()
        results = run(engine, order)
        assert [(r.tokens, r.text, r.finish_reason) for r in results] == [alone[i] for i in order]


def test_guided_output_obeys(alone: list[Any]) -> None:
    texts = [text for _, text, _ in alone]
    assert texts[2] in ("yes", "no", "perhaps")
    assert texts[5] in ("1", '"two"', "null")
    assert alone[2][2] == "stop"


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32 - 1))
def test_drafts_never_change_the_output(alone: list[Any], engine: Engine, seed: int) -> None:
    """Predictions that are right in places: same tokens, sampled or greedy, guided or free."""
    rng = np.random.default_rng(seed)
    drafts = []
    for expected, _, _ in alone:
        guess = np.array([*expected, STOP, 5, 6, 7])
        wrong = rng.random(len(guess)) < rng.choice([0.0, 0.3, 1.0])
        guess[wrong] = rng.integers(0, CONFIG.vocab_size, wrong.sum())
        drafts.append(ScriptedDrafts(tuple(guess.tolist())))
    results = run(engine, range(len(WORK)), drafts)
    assert [(r.tokens, r.text, r.finish_reason) for r in results] == alone


def test_right_drafts_save_forward_passes(engine: Engine, alone: list[Any]) -> None:
    right = [ScriptedDrafts(expected) for expected, _, _ in alone]
    for result in run(engine, range(len(WORK)), right, jump="off"):
        assert result.stats["drafts_accepted"] == result.stats["drafts_proposed"] > 0
        assert result.stats["forwards"] <= -(-(result.stats["tokens"] + 1) // SPEC.queries) + 1


def test_many_requests_queue_for_few_slots(engine: Engine) -> None:
    results = engine.generate(
        ["Q"] * 23,
        sampling=[Sampling(max_tokens=1 + i % 5, temperature=1.0, seed=i) for i in range(23)],
    )
    assert all(r.finish_reason in ("length", "stop") for r in results)
    assert len({r.tokens for r in results}) > 10


def test_threads_may_share_an_engine(engine: Engine, alone: list[Any]) -> None:
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        found[i] = run(engine, [i])[0].tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(WORK))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(WORK))] == [expected for expected, _, _ in alone]


# Compiles and memory ------------------------------------------------------------------------------


def test_nothing_compiles_and_nothing_leaks_after_warm_up(
    engine: Engine, compiles: list[str]
) -> None:
    run(engine, range(len(WORK)))
    engine.generate(["a" * 5, "b" * 100], sampling=Sampling(max_tokens=2))
    compiles.clear()
    arrays = len(jax.live_arrays())
    for seed in range(3):
        run(engine, np.random.default_rng(seed).permutation(len(WORK)).tolist())
        engine.generate(
            ["c" * n for n in (1, 2, 33, 64, 97)],
            guide=Guide.regex(f"[a-f]{{{seed + 1}}}"),
            sampling=Sampling(max_tokens=9, temperature=0.1 * seed, top_k=seed, min_p=0.1 * seed),
        )
        engine.update_params(jax.tree.map(lambda x: x, PARAMS))
    assert compiles == []
    # A result is there a moment before the loop that made it has returned.
    deadline = time.monotonic() + 5
    while len(jax.live_arrays()) > arrays and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(jax.live_arrays()) <= arrays


def test_new_weights_are_used_and_others_refused() -> None:
    other = random_params(CONFIG, seed=1)
    with make_engine() as engine, Engine(MODEL, other, TOKENIZER, cache=SPEC, slots=4) as reference:
        before = engine.generate("Once")[0].tokens
        engine.update_params(other)
        after = engine.generate("Once")[0].tokens
        assert after == reference.generate("Once")[0].tokens != before
        with pytest.raises(UserError, match="params differ"):
            engine.update_params(random_params(text_config(num_layers=1)))


# Failures stay where they belong --------------------------------------------------------------------


def scripted(script: Script, **options: Any) -> Engine:
    return make_engine(backend=ScriptedBackend(script), **options)


@pytest.mark.parametrize("loop", ["device", "host"])
@pytest.mark.parametrize(
    ("trouble", "error"), [({"fail_at": 3}, RuntimeError), ({"dead_end_at": 3}, DeadEndError)]
)
def test_a_failing_grammar_fails_its_request_alone(
    loop: Any, trouble: dict[str, int], error: type[Exception], alone: list[Any]
) -> None:
    script = Script.of([LETTERS] * 8, **trouble)
    with scripted(script, loop=loop) as engine:
        free, guided, other = engine.generate(
            ["Once", "x", "Say"],
            guide=[None, Guide.regex("ignored by the script"), None],
            sampling=[WORK[0][2], Sampling(max_tokens=20), WORK[4][2]],
        )
        assert guided.finish_reason == "error"
        assert isinstance(guided.error, error)
        assert len(guided.tokens) == 3  # what came before the trouble is kept
        assert (free.tokens, other.tokens) == (alone[0][0], alone[4][0])
        assert engine.generate("Once", sampling=WORK[0][2])[0].tokens == alone[0][0]


def test_a_dead_end_behind_a_draft_fails_only_if_the_draft_is_taken() -> None:
    script = Script.of([[97], [98], [99], [100, 101]], dead_end_at=2)
    with scripted(script) as engine:
        guide = Guide.regex("ignored")
        for prediction, taken in (((97, 98, 99), 2), ((97, 120), 2), ((), 2)):
            (result,) = engine.generate("x", guide=guide, drafts=ScriptedDrafts(prediction))
            assert isinstance(result.error, DeadEndError)
            assert result.tokens == (97, 98)[:taken]


def test_a_fill_that_never_comes_back_fails_its_requests_and_not_the_engine() -> None:
    script = Script.of([LETTERS] * 8, fill_delay_s=3.0)
    with scripted(script, watchdog_s=0.2) as engine:
        (result,) = engine.generate("x", guide=Guide.regex("ignored"))
        assert isinstance(result.error, GrammarTimeout)
        assert engine.generate("Once", sampling=Sampling(max_tokens=5))[0].finish_reason == "length"


def test_a_failing_device_program_fails_its_requests_and_not_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make_engine() as engine:
        expected = engine.generate("Once", sampling=Sampling(max_tokens=5))[0].tokens

        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr("gkv_jax.scheduler.device_loop", broken)
            (result,) = engine.generate("Once")
            assert result.finish_reason == "error"
            assert "out of memory" in str(result.error)
        assert engine.generate("Once", sampling=Sampling(max_tokens=5))[0].tokens == expected


class _Broken:
    """A draft source that cannot propose."""

    def propose(self, output: Sequence[int], ahead: Sequence[int], limit: int) -> Sequence[int]:
        raise RuntimeError("no drafts today")


def test_a_failing_admission_fails_its_request_alone(
    engine: Engine, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar without matcher, and a draft source that raises, beside a request that is running."""
    guided = engine.prepare("a", Guide.regex("[xyz]+"))
    drafted = engine.prepare("a", drafts=_Broken())
    running = engine.prepare(*WORK[1])

    def refuse(*_: Any, **__: Any) -> GrammarMatcher:
        raise RuntimeError("no matcher today")

    engine.submit(running)
    next(running.pieces())
    with monkeypatch.context() as patch:
        patch.setattr(type(guided.grammar), "matcher", refuse)
        engine.submit(guided)
        assert "no matcher today" in str(guided.result().error)
    engine.submit(drafted)
    assert "no drafts today" in str(drafted.result().error)
    assert running.result().tokens == alone[1][0]


def test_a_sink_that_raises_has_left(engine: Engine, alone: list[Any]) -> None:
    def sink(_: Any) -> None:
        raise ValueError("nobody is here")

    request = engine.prepare("go", Guide.regex("[a-z]*x"), Sampling(max_tokens=100_000))
    request.sink = sink
    engine.submit(request)
    assert isinstance(request.result().error, RequestCancelled)
    assert run(engine, [0])[0].tokens == alone[0][0]


def test_an_engine_that_cannot_get_a_cache_again_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    all_wait = threading.Event()

    def broken(*_: Any, **__: Any) -> None:
        all_wait.wait()
        raise RuntimeError("out of memory")

    monkeypatch.setattr("gkv_jax.scheduler.device_loop", broken)
    monkeypatch.setattr("gkv_jax.scheduler.init_cache", broken)
    requests = [engine.prepare("a") for _ in range(6)]
    for request in requests:
        engine.submit(request)
    assert engine.failure is None
    all_wait.set()
    errors = [request.result().error for request in requests]
    assert all("out of memory" in str(error) for error in errors)
    assert isinstance(errors[-1], EngineFailedError)
    assert isinstance(engine.failure, RuntimeError)
    assert engine.closed
    assert (engine.active, engine.queued) == (0, 0)
    with pytest.raises(EngineFailedError, match=r"has failed \(RuntimeError: out of memory\)"):
        engine.generate("a")
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("gkv_jax", "CRITICAL")
    assert record.exc_info is not None
    assert record.exc_info[1] is engine.failure
    engine.close()


def _end_thread(*_: Any) -> None:
    raise SystemExit


def test_whatever_ends_the_engine_thread_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of the scheduler itself, while a request decodes and another is read."""
    engine = make_engine()
    running = engine.prepare("go", Guide.regex("[a-z]*x"), Sampling(max_tokens=100_000))
    engine.submit(running)
    next(running.pieces())

    monkeypatch.setattr("gkv_jax.scheduler.Scheduler._go_on", _end_thread)
    reading = engine.prepare("a")
    engine.submit(reading)
    assert isinstance(reading.result().error, EngineFailedError)
    assert isinstance(running.result().error, EngineFailedError)
    assert isinstance(engine.failure, SystemExit)


def test_a_request_that_is_refused_was_not_submitted() -> None:
    engine = make_engine()
    request = engine.prepare("a", sampling=Sampling(max_tokens=2))
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.submit(request)
    assert request.submitted == 0.0
    with make_engine() as other:
        other.submit(request)
        assert request.result().error is None
        submitted = request.submitted
        with pytest.raises(UserError, match="submitted before"):
            other.submit(request)
    assert request.submitted == submitted


def test_bad_requests_are_results_not_exceptions(engine: Engine, alone: list[Any]) -> None:
    results = engine.generate(
        ["", "Once", "x", [{"role": "user"}]],
        guide=[None, None, Guide.regex("(unclosed"), None],
        sampling=WORK[0][2],
    )
    assert [r.finish_reason for r in results] == ["error", alone[0][2], "error", "error"]
    assert results[1].tokens == alone[0][0]
    assert "empty" in str(results[0].error)
    assert "regex" in str(results[2].error)
    assert "'role' and 'content'" in str(results[3].error)
    with pytest.raises(UserError, match="empty"):
        engine.stream("")
    with pytest.raises(UserError, match="sampling has 2 entries for 1 prompts"):
        engine.generate("x", sampling=[Sampling(), Sampling()])
    with pytest.raises(UserError, match="prompts is"):
        engine.generate({"role": "user", "content": "x"})
    assert "guide is 'abc'" in str(engine.generate("x", guide="abc")[0].error)
    request = engine.prepare("x")
    engine.submit(request)
    request.result()
    with pytest.raises(UserError, match="submitted before"):
        engine.submit(request)


def test_options_that_cannot_be_served_are_refused_at_once() -> None:
    for options, said in (
        ({"slots": 0}, "slots is 0"),
        ({"loop": "fast"}, "loop is 'fast'"),
        ({"backend": "nope"}, "xgrammar"),
        ({"cache": CacheSpec(window=1020)}, "smaller window"),
    ):
        with pytest.raises(UserError, match=said):
            make_engine(**options)


def test_an_impossible_cache_limit_is_an_error_of_guided_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XGRAMMAR_CACHE_LIMIT_GB", "1GB")
    with make_engine() as engine:
        free, guided = engine.generate(["x", "x"], guide=[None, Guide.json()])
    assert free.error is None
    assert "XGRAMMAR_CACHE_LIMIT_GB" in str(guided.error)


# Streams ------------------------------------------------------------------------------------------


def test_a_stream_is_the_result_in_pieces(engine: Engine, alone: list[Any]) -> None:
    for (prompt, guide, sampling), (expected, text, _) in zip(WORK, alone, strict=True):
        pieces = list(engine.stream(prompt, guide=guide, sampling=sampling))
        assert "".join(p.text for p in pieces) == text
        assert tuple(itertools.chain.from_iterable(p.tokens for p in pieces)) == expected


def test_a_stream_that_is_dropped_unread_is_cancelled(engine: Engine) -> None:
    for _ in range(SPEC.queries * 3):
        engine.stream("go", guide=Guide.regex("[a-z]*x"), sampling=Sampling(max_tokens=100_000))
    assert engine.generate("Once", sampling=Sampling(max_tokens=3))[0].finish_reason == "length"


def test_a_cancelled_request_need_not_wait_for_a_slot(engine: Engine) -> None:
    guide, sampling = Guide.regex("[a-z]*x"), Sampling(max_tokens=100_000, seed=3)
    seated = [engine.prepare("go", guide, sampling) for _ in range(engine.slots)]
    queued = engine.prepare("wait", guide, sampling)
    for request in [*seated, queued]:
        engine.submit(request)
    next(seated[-1].pieces())
    queued.cancel()
    assert isinstance(queued.result().error, RequestCancelled)
    assert all(request.finish_reason is None for request in seated)
    for request in seated:
        request.cancel()
        request.result()


def test_leaving_a_stream_frees_its_slot(engine: Engine) -> None:
    sampling = Sampling(max_tokens=100_000, temperature=1.0)
    guide = Guide.regex("[a-z]*x")
    for _ in range(SPEC.queries * 3):  # more of them than slots
        stream = engine.stream("go", guide=guide, sampling=sampling)
        next(stream)
        stream.close()
    assert engine.generate("Once", sampling=Sampling(max_tokens=3))[0].finish_reason == "length"


def test_a_cancelled_request_ends_while_others_go_on(engine: Engine, alone: list[Any]) -> None:
    endless = engine.prepare("go", Guide.regex("[a-z]*x"), Sampling(max_tokens=100_000, seed=3))
    engine.submit(endless)
    next(endless.pieces())
    other = engine.prepare(*WORK[1])
    engine.submit(other)
    endless.cancel()
    assert isinstance(endless.result().error, RequestCancelled)
    assert other.result().tokens == alone[1][0]


def test_an_error_on_the_way_is_raised_after_the_pieces() -> None:
    with scripted(Script.of([tokens("a")] * 8, dead_end_at=2)) as engine:
        stream = engine.stream("x", guide=Guide.regex("ignored"))
        assert [next(stream).text, next(stream).text] == ["a", "a"]
        with pytest.raises(DeadEndError):
            next(stream)


def test_stop_texts_end_the_output_and_are_not_in_it(engine: Engine) -> None:
    guide = Guide.regex("abc(def)+ghi")
    sampling = Sampling(max_tokens=40, stop=("zz", "cde"))
    (result,) = engine.generate("x", guide=guide, sampling=sampling)
    assert (result.text, result.finish_reason) == ("ab", "stop")
    pieces = [p.text for p in engine.stream("x", guide=guide, sampling=sampling)]
    assert "".join(pieces) == "ab"


def test_drafts_behind_a_stop_text_change_nothing() -> None:
    """Not the tokens, and not the outcome: what was verified behind it never happened."""
    script = Script.of([tokens(c) for c in "abcd"], dead_end_at=2)
    with scripted(script) as engine:
        guide, sampling = Guide.regex("ignored"), Sampling(stop="b")
        (plain,) = engine.generate("x", guide=guide, sampling=sampling)
        prediction = ScriptedDrafts(tuple(tokens("abc")))
        (drafted,) = engine.generate("x", guide=guide, sampling=sampling, drafts=prediction)
    assert (plain.text, plain.finish_reason) == ("a", "stop")
    assert (drafted.text, drafted.finish_reason, drafted.tokens) == ("a", "stop", plain.tokens)


def test_characters_of_several_tokens_arrive_whole(engine: Engine) -> None:
    text = "é, 漢字 and 🦜🦜."
    pieces = [p.text for p in engine.stream("x", guide=Guide.choice([text]))]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


# Limits -------------------------------------------------------------------------------------------


def test_max_tokens_counts_exactly_even_with_drafts(engine: Engine) -> None:
    guide = Guide.regex("[a-z]{50,60}")
    for limit in range(1, 9):
        sampling = Sampling(max_tokens=limit)
        (plain,) = engine.generate("x", guide=guide, sampling=sampling)
        assert (len(plain.tokens), plain.finish_reason) == (limit, "length")
        more = engine.generate("x", guide=guide, sampling=Sampling(max_tokens=limit + 5))[0].tokens
        (drafted,) = engine.generate(
            "x", guide=guide, sampling=sampling, drafts=ScriptedDrafts(more)
        )
        assert drafted.tokens == plain.tokens


def test_a_full_cache_ends_a_request_and_refuses_a_prompt_too_long() -> None:
    spec = CacheSpec.full(24, max_drafts=2)
    with make_engine(cache=spec, loop="host") as engine:
        guide = Guide.regex("[a-z]*X")
        (result,) = engine.generate("0123456789", guide=guide, sampling=Sampling(max_tokens=99))
        # 24 positions hold the prompt and all but the last token, which no later one attends to.
        assert (result.finish_reason, len(result.tokens)) == ("length", 15)
        drafted = engine.generate(
            "0123456789",
            guide=guide,
            sampling=Sampling(max_tokens=99),
            drafts=ScriptedDrafts(result.tokens),
        )
        assert drafted[0].tokens == result.tokens
        (refused,) = engine.generate("x" * 25)
        assert "prompt has 25 tokens, but policy 'full' has room for 24" in str(refused.error)
        assert "window" in str(refused.error)


def test_a_prompt_beyond_the_trained_length_needs_a_policy_that_streams() -> None:
    prompt = "y" * (MODEL.max_positions + 1)
    for spec in (
        CacheSpec(policy="snapkv", sinks=4, kept=8, window=20),
        CacheSpec.full(2 * MODEL.max_positions),
    ):
        with make_engine(cache=spec) as engine:
            (refused,) = engine.generate(prompt)
            assert "policy 'window'" in str(refused.error)
    with make_engine() as engine:
        assert engine.generate(prompt, sampling=Sampling(max_tokens=2))[0].error is None


def test_cache_bytes_do_not_grow(engine: Engine) -> None:
    guide = Guide.regex("[a-z]{400}")
    short = engine.generate("a", guide=guide, sampling=Sampling(max_tokens=2))
    long = engine.generate(LONG, guide=guide, sampling=Sampling(max_tokens=300))
    assert long[0].stats["tokens"] == 300
    assert short[0].stats["cache_bytes"] == long[0].stats["cache_bytes"] == engine.cache_bytes > 0


def test_snapkv_serves_short_and_long_prompts_in_one_batch() -> None:
    spec = CacheSpec(policy="snapkv", sinks=2, kept=10, window=12, max_drafts=2, observe=4)
    prompts = ["a", "short one", LONG, LONG[:25], LONG[3:140]]
    with make_engine(cache=spec) as engine:
        together = engine.generate(prompts, sampling=Sampling(max_tokens=30))
        for prompt, result in zip(prompts, together, strict=True):
            (alone,) = engine.generate(prompt, sampling=Sampling(max_tokens=30))
            assert result.tokens == alone.tokens


# The fill runs beside the forward pass ---------------------------------------------------------------


def test_masks_are_filled_while_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fill outlives the submit that began it, and begins before the device asks for it.

    In series with either, it would not. (Under the host driver the second half says nothing: it
    dispatches the forward pass and then waits.)
    """
    at: dict[str, list[int]] = {name: [] for name in ("answer", "fill", "filled", "collect")}
    clock = itertools.count()
    submit, collect = Session.submit, Session.collect
    fill = GrammarMatcher.fill_next_token_bitmask

    def submitting(self: Session, sampled: np.ndarray) -> np.ndarray:
        answer = submit(self, sampled)
        at["answer"].append(next(clock))
        return answer

    def collecting(self: Session) -> np.ndarray:
        at["collect"].append(next(clock))
        return collect(self)

    def filling(self: GrammarMatcher, *args: Any) -> None:
        at["fill"].append(next(clock))
        fill(self, *args)
        at["filled"].append(next(clock))

    # Wide enough that a forward pass takes milliseconds, and a thread some microseconds to start.
    config = text_config(hidden_size=512, intermediate_size=2048, num_layers=4)
    backend = ScriptedBackend(Script.of([LETTERS] * 30, fill_delay_s=0.002))
    with Engine(
        Llama(config), random_params(config), TOKENIZER, cache=SPEC, slots=1, backend=backend
    ) as engine:
        request = engine.prepare("x", Guide.regex("ignored"), Sampling(max_tokens=20))
        monkeypatch.setattr(Session, "submit", submitting)
        monkeypatch.setattr(Session, "collect", collecting)
        monkeypatch.setattr(GrammarMatcher, "fill_next_token_bitmask", filling)
        engine.submit(request)
        assert request.result().stats["forwards"] == 20
    assert [len(at[name]) for name in ("fill", "filled", "collect")] == [20, 20, 20]
    before_asked = [f < c for f, c in zip(at["fill"], at["collect"], strict=True)]
    # The first step has no submit before it: the engine asked for its masks.
    outlives = [
        answer < filled for answer, filled in zip(at["answer"], at["filled"][1:], strict=False)
    ]
    assert before_asked.count(True) >= 15
    assert outlives.count(True) >= 15


def test_warm_up_leaves_nothing_to_compile(compiles: list[str]) -> None:
    with make_engine(cache=CacheSpec(sinks=3, window=19, prefill_chunk=128)) as engine:
        engine.warm_up()
        compiles.clear()
        for length in (1, 2, 33, 34, 64, 100, 128, 129, 130, 300):
            engine.generate("w" * length, sampling=Sampling(max_tokens=2, temperature=0.5))
        # And beside one that decodes, where reading a prompt and steps take turns.
        running = engine.prepare("go", Guide.regex("[a-z]*x"), Sampling(max_tokens=100_000))
        engine.submit(running)
        next(running.pieces())
        for length in (20, 65, 130, 300):
            (result,) = engine.generate("w" * length, sampling=Sampling(max_tokens=2))
            assert result.error is None
        assert running.finish_reason is None
    assert compiles == []


def test_a_closed_engine_says_so() -> None:
    engine = make_engine()
    running = engine.prepare("go", Guide.regex("[a-z]*x"), Sampling(max_tokens=100_000))
    engine.submit(running)
    next(running.pieces())
    engine.close()
    assert isinstance(running.result().error, EngineClosedError)
    with pytest.raises(EngineClosedError):
        engine.generate("x")


def test_no_request_is_lost_between_submit_and_close() -> None:
    """Threads submit while the engine closes: each request ends, or its submission is refused."""
    for _ in range(5):
        engine = make_engine()
        ends: list[str] = []

        def work(engine: Engine = engine, ends: list[str] = ends) -> None:
            try:
                engine.generate(["a"] * 3, sampling=Sampling(max_tokens=2))
                ends.append("served")
            except EngineClosedError:
                ends.append("refused")

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        engine.close()
        for thread in threads:
            thread.join(timeout=30)
        assert len(ends) == 6


@pytest.mark.parametrize("has_failed", [False, True])
def test_an_engine_that_nobody_holds_is_freed(
    has_failed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Or pytest holds it, by the traceback.
    caplog.set_level(logging.CRITICAL + 1, logger="gkv_jax")
    engine = make_engine()
    engine.generate("x", sampling=Sampling(max_tokens=2))
    if has_failed:
        monkeypatch.setattr("gkv_jax.scheduler.Scheduler._go_on", _end_thread)
        assert engine.generate("x")[0].finish_reason == "error"
    gone = [weakref.ref(engine), weakref.ref(engine._scheduler)]
    del engine
    deadline = time.monotonic() + 10
    while any(ref() for ref in gone) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert [ref() for ref in gone] == [None, None]


def test_what_is_running_outlives_the_engine_that_nobody_holds() -> None:
    engine = make_engine()
    stream = engine.stream("x", guide=Guide.regex("[a-z]{30}"))
    gone = weakref.ref(engine)
    next(stream)
    del engine
    gc.collect()
    assert gone() is None
    assert len("".join(piece.text for piece in stream)) == 29


@pytest.mark.parametrize("stuck", [False, True])
def test_the_interpreter_ends_with_work_in_flight(stuck: bool) -> None:
    """No hang, no crash, no traceback but the script's own, even while a fill never returns."""
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import tests.conftest
from tests.gkv_jax.test_engine import *
engine = make_engine(watchdog_s=0.2)
request = engine.prepare("go", Guide.regex("[a-z]*x"), Sampling(max_tokens=10**6))
if {stuck}:
    GrammarMatcher.fill_next_token_bitmask = lambda *_: time.sleep(3600)
    engine.submit(request)
    assert isinstance(request.result().error, GrammarTimeout)
else:
    engine.submit(request)
    next(request.pieces())
raise SystemExit("as intended")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert (done.returncode, done.stderr.strip()) == (1, "as intended")
