"""Cache, coalescing, routing and the refusal of grammars that nothing satisfies."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grammar_host import (
    SERVED_BACKENDS,
    CompileCrashError,
    CompileServiceError,
    CompileTimeoutError,
    EmptyLanguageError,
    GrammarCompiler,
    GrammarTooComplexError,
    Guide,
    InvalidGuideError,
)
from grammar_host.backends.base import Backend, CompiledGuide
from grammar_host.backends.scripted import Script, ScriptedBackend, ScriptedMatcher
from grammar_host.compiler import CACHE_LIMIT_VARIABLE, cache_limit_from_environment
from tests.grammar_host.common import SCRIPT, STOP, accepts, legal, tokenizer_info


class CountingBackend(Backend):
    """Counts and delays compilations; refuses guides whose text says so."""

    name = "counting"

    def __init__(self, memory_bytes: int = 100, seconds: float = 0.0) -> None:
        self.compiled: list[str] = []
        self._memory_bytes = memory_bytes
        self._seconds = seconds
        self.started = threading.Event()

    def compile(self, guide: Guide) -> CompiledGuide:
        self.compiled.append(guide.text)
        self.started.set()
        time.sleep(self._seconds)
        if guide.text == "bad":
            raise InvalidGuideError(guide.param, "it says so")
        return CompiledGuide(lambda stops: ScriptedMatcher(SCRIPT, stops), self._memory_bytes)


def counting_compiler(limit: int, backend: CountingBackend) -> GrammarCompiler:
    return GrammarCompiler(tokenizer_info(), backend, cache_limit_bytes=limit)


def test_equal_guides_are_compiled_once():
    backend = CountingBackend()
    compiler = counting_compiler(10**6, backend)
    first = compiler.compile(Guide.regex("a"))
    assert compiler.compile(Guide.regex("a")) is first
    assert compiler.compile(Guide.grammar("a")) is not first
    assert backend.compiled == ["a", "a"]
    assert (first.backend, first.guide) == ("counting", Guide.regex("a"))
    assert first.compile_seconds >= 0
    assert first.memory_bytes == 101
    assert compiler.cache_bytes == 202


def test_the_least_recently_used_grammar_leaves_first():
    backend = CountingBackend(memory_bytes=99)
    compiler = counting_compiler(300, backend)
    for text in "abc":
        compiler.compile(Guide.regex(text))
    compiler.compile(Guide.regex("a"))
    compiler.compile(Guide.regex("d"))  # evicts b
    assert compiler.cache_bytes == 300
    backend.compiled.clear()
    for text in "acdb":
        compiler.compile(Guide.regex(text))
    assert backend.compiled == ["b"]


def test_what_is_larger_than_the_cache_is_served_and_evicts_nothing():
    backend = CountingBackend(memory_bytes=99)
    compiler = counting_compiler(150, backend)
    compiler.compile(Guide.regex("a"))
    large = Guide.regex("b" * 100)
    assert legal(compiler.compile(large).matcher()) == [97, 98]
    compiler.compile(Guide.regex("a"))
    compiler.compile(large)
    assert backend.compiled == ["a", large.text, large.text]
    nothing = counting_compiler(0, backend)
    assert nothing.compile(Guide.regex("a")) is not nothing.compile(Guide.regex("a"))
    assert nothing.cache_bytes == 0


@pytest.mark.parametrize("text", ["good", "bad"])
def test_concurrent_compilations_of_one_guide_are_coalesced(text):
    backend = CountingBackend(seconds=0.2)
    compiler = counting_compiler(0, backend)  # no cache: only coalescing can save work

    def compile_one(_):
        try:
            return compiler.compile(Guide.regex(text))
        except InvalidGuideError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(compile_one, 0)
        assert backend.started.wait(5)
        others = list(pool.map(compile_one, range(7)))
    results = [first.result(), *others]
    assert len(backend.compiled) == 1
    assert all(result == results[0] for result in results)
    assert (results[0] == "regex: it says so") == (text == "bad")
    compile_one(0)  # the error is remembered, the result is not
    assert len(backend.compiled) == (1 if text == "bad" else 2)
    assert compiler.stats().coalesced == 7


class MeetingBackend(Backend):
    """Compiles nothing until two threads are at it."""

    name = "meeting"

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)

    def compile(self, guide: Guide) -> CompiledGuide:
        self._barrier.wait(timeout=20)
        return CompiledGuide(lambda stops: ScriptedMatcher(SCRIPT, stops), 1)


def test_different_guides_compile_at_the_same_time_and_off_the_callers_thread():
    compiler = GrammarCompiler(tokenizer_info(), MeetingBackend())
    futures = [compiler.submit(Guide.regex(text)) for text in "ab"]
    assert [future.result().guide.text for future in futures] == ["a", "b"]


def test_many_threads_on_the_real_engine():
    compiler = GrammarCompiler(tokenizer_info(), "xgrammar", cache_limit_bytes=20_000)
    guides = [Guide.regex(f"a{{{n}}}[bc]+") for n in range(1, 9)] * 6
    with ThreadPoolExecutor(6) as pool:
        grammars = list(pool.map(compiler.compile, guides))
    for guide, grammar in zip(guides, grammars, strict=True):
        assert grammar.guide == guide
        assert grammar.backend == "xgrammar"
        assert grammar.exact
        assert grammar.compile_seconds > 0
        assert grammar.plan_seconds > 0
        assert 97 in legal(grammar.matcher())
    assert 0 < compiler.cache_bytes <= 20_000
    stats = compiler.stats()
    assert stats.cache_hits + stats.cache_misses + stats.coalesced == 48
    assert stats.service is not None
    assert stats.service.crashed == stats.service.timed_out == 0
    compiler.close()


def test_failures_are_remembered_briefly(monkeypatch):
    backend = CountingBackend()
    compiler = counting_compiler(10**6, backend)
    bad = Guide.regex("bad")
    for _ in range(3):
        with pytest.raises(InvalidGuideError, match="it says so"):
            compiler.compile(bad)
    assert backend.compiled == ["bad"]
    assert (compiler.stats().cache_misses, compiler.stats().failures) == (1, 1)
    monkeypatch.setattr("grammar_host.compiler.FAILURE_SECONDS", 0.0)
    with pytest.raises(InvalidGuideError):
        compiler.compile(bad)
    assert backend.compiled == ["bad", "bad"]


def test_remembered_failures_are_bounded(monkeypatch):
    monkeypatch.setattr("grammar_host.compiler.MAX_FAILURES", 2)
    backend = RefusingBackend()
    compiler = GrammarCompiler(tokenizer_info(), backend)
    for text in "abcabc":
        with pytest.raises(InvalidGuideError):
            compiler.compile(Guide.regex(text))
    assert backend.compiled == 6


class RefusingBackend(Backend):
    name = "refusing"

    def __init__(self) -> None:
        self.compiled = 0

    def compile(self, guide: Guide) -> CompiledGuide:
        self.compiled += 1
        raise InvalidGuideError(guide.param, "always")


SLOW = Guide.grammar("root ::= " + '"a"? ' * 3000)
"""XGrammar needs far longer than a second for it."""


def test_a_compilation_is_stopped_at_its_deadline_and_others_are_not_disturbed():
    compiler = GrammarCompiler(tokenizer_info(), "xgrammar", timeout_s=1.0)
    compiler.compile(Guide.regex("warm"))  # a worker with the engine is ready
    slow = compiler.submit(SLOW)
    others = [compiler.submit(Guide.regex(f"a{n}")) for n in range(5)]
    assert [other.result().backend for other in others] == ["xgrammar"] * 5
    with pytest.raises(CompileTimeoutError, match="grammar") as info:
        slow.result()
    assert (info.value.code, info.value.param) == ("grammar_compile_timeout", "grammar")
    assert compiler.compile(Guide.regex("after")).backend == "xgrammar"
    stats = compiler.stats().service
    assert stats is not None
    assert (stats.timed_out, stats.crashed) == (1, 0)
    compiler.close()


def test_a_compilation_is_stopped_at_the_memory_limit():
    compiler = GrammarCompiler(tokenizer_info(), "outlines", memory_limit_bytes=10**8)
    with pytest.raises(GrammarTooComplexError) as info:
        compiler.compile(Guide.regex("(a|b)*a(a|b){20}"))  # 2²⁰ states once it is deterministic
    assert info.value.code == "grammar_too_complex"
    assert compiler.compile(Guide.regex("ab")).backend == "outlines"
    compiler.close()


class BuggyBackend(Backend):
    name = "buggy"

    def compile(self, guide: Guide) -> CompiledGuide:
        raise KeyError("oops")


def test_bugs_are_errors_of_their_guide():
    compiler = GrammarCompiler(tokenizer_info(), BuggyBackend())
    with pytest.raises(CompileCrashError, match="internal KeyError") as info:
        compiler.compile(Guide.regex("a"))
    assert (info.value.code, info.value.param) == ("grammar_compile_crash", "regex")
    assert isinstance(info.value.__cause__, KeyError)


def test_an_engine_that_crashes_leaves_the_guide_to_the_next_one():
    # Rounding to a float makes one engine negate the smallest integer there is.
    guide = Guide.json_schema({"type": "integer", "const": -9223372036854775800})
    compiler = GrammarCompiler(tokenizer_info())
    assert accepts(compiler.compile(guide).matcher(), "-9223372036854775800")
    compiler.close()


class WaitingBackend(Backend):
    """Compiles nothing until it is told to."""

    name = "waiting"

    def __init__(self) -> None:
        self.go = threading.Event()

    def compile(self, guide: Guide) -> CompiledGuide:
        self.go.wait(20)
        return CompiledGuide(lambda stops: ScriptedMatcher(SCRIPT, stops), 1)


def test_closing_settles_every_future():
    backend = WaitingBackend()
    compiler = GrammarCompiler(tokenizer_info(), backend)
    futures = [compiler.submit(Guide.regex(text)) for text in "abcdef"]
    compiler.close()
    for future in futures:
        with pytest.raises(CompileServiceError, match="closed"):
            future.result(timeout=20)
    backend.go.set()
    with pytest.raises(CompileServiceError):
        compiler.compile(Guide.regex("g"))


def test_nobody_can_cancel_what_others_may_wait_for():
    backend = WaitingBackend()
    compiler = GrammarCompiler(tokenizer_info(), backend)
    first, second = compiler.submit(Guide.regex("a")), compiler.submit(Guide.regex("a"))
    assert not first.cancel()
    backend.go.set()
    assert second.result().guide == Guide.regex("a")
    assert compiler.stats().failures == 0


def test_a_remembered_failure_is_a_new_error_each_time():
    compiler = GrammarCompiler(tokenizer_info(), RefusingBackend())
    errors = []
    for _ in range(3):
        with pytest.raises(InvalidGuideError, match="always") as info:
            compiler.compile(Guide.regex("a"))
        errors.append(info.value)
    assert len({id(error) for error in errors}) == 3


def test_a_thread_that_compiles_does_not_keep_the_interpreter_from_ending():
    script = """
import threading
from tests.grammar_host.common import tokenizer_info
from grammar_host import GrammarCompiler, Guide
compiler = GrammarCompiler(tokenizer_info())
threading.Thread(target=lambda: compiler.compile(Guide.json_schema({"type": "object"}))).start()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0


def test_after_close_guides_are_refused_and_nothing_hangs():
    compiler = GrammarCompiler(tokenizer_info())
    grammar = compiler.compile(Guide.regex("a+"))
    compiler.close()
    assert compiler.compile(Guide.regex("a+")) is grammar
    with pytest.raises(CompileServiceError):
        compiler.compile(Guide.regex("b+"))


@pytest.mark.parametrize(("text", "limit"), [("2", 2 * 10**9), ("0.5", 5 * 10**8), ("0", 0)])
def test_the_cache_limit_comes_from_the_environment(monkeypatch, text, limit):
    monkeypatch.setenv(CACHE_LIMIT_VARIABLE, text)
    assert cache_limit_from_environment() == limit
    monkeypatch.delenv(CACHE_LIMIT_VARIABLE)
    assert cache_limit_from_environment() == 10**9


@pytest.mark.parametrize("text", ["", "many", "-1", "nan", "inf"])
def test_an_invalid_cache_limit_is_refused(monkeypatch, text):
    monkeypatch.setenv(CACHE_LIMIT_VARIABLE, text)
    with pytest.raises(ValueError, match=CACHE_LIMIT_VARIABLE):
        GrammarCompiler(tokenizer_info())
    GrammarCompiler(tokenizer_info(), cache_limit_bytes=5)  # an explicit limit does not read it
    with pytest.raises(ValueError, match="at least 0"):
        GrammarCompiler(tokenizer_info(), cache_limit_bytes=-1)


@pytest.mark.parametrize("name", ["guidance", "nonsense", ""])
def test_engines_that_are_not_served_are_named_with_those_that_are(name):
    for refuse in (
        lambda: GrammarCompiler(tokenizer_info(), name),
        lambda: GrammarCompiler(tokenizer_info()).compile(Guide.json(), backend=name),
    ):
        with pytest.raises(InvalidGuideError, match="served are: auto, xgrammar") as info:
            refuse()
        assert (info.value.param, info.value.code) == ("backend", "invalid_backend")


def test_the_engine_can_be_chosen_per_guide():
    compiler = GrammarCompiler(tokenizer_info(), ScriptedBackend(SCRIPT))
    guide = Guide.choice(["x"])
    assert compiler.compile(guide).backend == "scripted"
    for name in SERVED_BACKENDS:
        grammar = compiler.compile(guide, backend=name)
        assert grammar.backend == name
        assert legal(grammar.matcher()) == [ord("x")]
    assert compiler.compile(guide, backend="auto").backend == "llguidance"
    assert legal(compiler.compile(guide, backend="scripted").matcher()) == [97, 98]
    compiler.close()


@pytest.mark.parametrize("isolation", ["process", "none"])
def test_a_schema_says_how_it_is_enforced(isolation):
    compiler = GrammarCompiler(tokenizer_info(), isolation=isolation)
    exact = compiler.compile(Guide.json_schema({"type": "integer", "minimum": 3}))
    assert (exact.backend, exact.exact, exact.notes) == ("llguidance", True, ())
    gated = compiler.compile(Guide.json_schema({"type": "array", "uniqueItems": True}))
    assert not gated.exact
    assert "/uniqueItems" in gated.notes[0]
    assert accepts(gated.matcher(), "[1,2]")
    assert not accepts(gated.matcher(), "[1,1]")
    compiler.close()


def test_a_grammar_without_a_first_token_is_refused():
    script = Script(SCRIPT.allowed, dead_end_at=0)
    compiler = GrammarCompiler(tokenizer_info(), ScriptedBackend(script))
    with pytest.raises(EmptyLanguageError, match="can begin") as info:
        compiler.compile(Guide.regex("a"))
    assert info.value.param == "regex"


def test_the_empty_text_is_a_text_but_no_json():
    compiler = GrammarCompiler(tokenizer_info(), ScriptedBackend(Script(())))
    assert legal(compiler.compile(Guide.regex("$")).matcher()) == [STOP]
    for guide in (Guide.json(), Guide.json_schema({})):
        with pytest.raises(EmptyLanguageError, match="no document"):
            compiler.compile(guide)
