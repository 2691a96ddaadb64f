"""Cache, coalescing, routing and the refusal of grammars that nothing satisfies."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from grammar_host import (
    SERVED_BACKENDS,
    EmptyLanguageError,
    GrammarCompiler,
    Guide,
    InvalidGuideError,
)
from grammar_host.backends.base import Backend, CompiledGuide
from grammar_host.backends.scripted import Script, ScriptedBackend, ScriptedMatcher
from grammar_host.compiler import CACHE_LIMIT_VARIABLE, cache_limit_from_environment
from tests.grammar_host.common import SCRIPT, STOP, legal, tokenizer_info


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
    backend = CountingBackend(seconds=0.05)
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
    compile_one(0)  # neither result nor error was kept
    assert len(backend.compiled) == 2


def test_different_guides_compile_at_the_same_time():
    backend = CountingBackend(seconds=0.1)
    compiler = counting_compiler(10**6, backend)
    started = time.perf_counter()
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda text: compiler.compile(Guide.regex(text)), "abcdef"))
    assert time.perf_counter() - started < 0.5
    assert compiler.cache_bytes == 6 * 101


def test_many_threads_on_the_real_engine():
    compiler = GrammarCompiler(tokenizer_info(), cache_limit_bytes=20_000)
    guides = [Guide.regex(f"a{{{n}}}[bc]+") for n in range(1, 9)] * 6
    with ThreadPoolExecutor(6) as pool:
        grammars = list(pool.map(compiler.compile, guides))
    for guide, grammar in zip(guides, grammars, strict=True):
        assert grammar.guide == guide
        assert grammar.backend == "xgrammar"
        assert grammar.compile_seconds > 0
        assert 97 in legal(grammar.matcher())
    assert 0 < compiler.cache_bytes <= 20_000


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


@pytest.mark.parametrize("name", ["llguidance", "outlines", "nonsense", ""])
def test_engines_that_are_not_served_are_named_with_those_that_are(name):
    for refuse in (
        lambda: GrammarCompiler(tokenizer_info(), name),
        lambda: GrammarCompiler(tokenizer_info()).compile(Guide.json(), backend=name),
    ):
        with pytest.raises(ValueError, match="served are: auto, xgrammar"):
            refuse()


def test_the_engine_can_be_chosen_per_guide():
    compiler = GrammarCompiler(tokenizer_info(), ScriptedBackend(SCRIPT))
    guide = Guide.choice(["x"])
    assert compiler.compile(guide).backend == "scripted"
    for name in ("auto", *SERVED_BACKENDS):
        grammar = compiler.compile(guide, backend=name)
        assert grammar.backend == "xgrammar"
        assert legal(grammar.matcher()) == [ord("x")]
    assert legal(compiler.compile(guide, backend="scripted").matcher()) == [97, 98]


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
