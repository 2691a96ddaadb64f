"""From guides to grammars: a killable trial, a cache, coalescing."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

from grammar_host.backends import check_backend_name
from grammar_host.backends.base import Backend, CompiledGuide, NewMatcher
from grammar_host.errors import (
    CompileCrashError,
    CompileServiceError,
    GrammarError,
    GuideError,
    UnsupportedGuideError,
)
from grammar_host.gate import Closers, with_gate, with_tag_gate
from grammar_host.guide import Guide
from grammar_host.matcher import GrammarMatcher
from grammar_host.named_tokens import named_special_tokens
from grammar_host.optional_reasoning import with_optional_reasoning
from grammar_host.plan import AUTO, FIRST_ENGINE, EngineNotLoaded, Plan, Planner
from grammar_host.reasoning import may_begin_with_blank, with_reasoning
from grammar_host.service import CompileService, ServiceStats
from grammar_host.tokenizer import TokenizerInfo

CACHE_LIMIT_VARIABLE = "XGRAMMAR_CACHE_LIMIT_GB"
"""Environment variable with the cache limit in GB (10⁹ bytes), as in TensorRT-LLM; default 1."""

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_MEMORY_LIMIT_BYTES = 4 * 10**9

FAILURE_SECONDS = 30.0
"""How long a guide that could not be compiled is refused without another trial."""
MAX_FAILURES = 256

COMPILE_THREADS = 2

GATE_BYTES_PER_CHARACTER = 20
"""What a gate's parsed schema, validators and tables take, per character of the schema."""

_CLOSED = "the compiler was closed; make a new one"


def cache_limit_from_environment() -> int:
    """The cache limit in bytes that the environment asks for.

    Raises:
        ValueError: the variable is not a finite number ≥ 0.
    """
    text = os.environ.get(CACHE_LIMIT_VARIABLE, "1")
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = math.nan
    if not (math.isfinite(gigabytes) and gigabytes >= 0):
        raise ValueError(f"{CACHE_LIMIT_VARIABLE}={text!r} is not a number of gigabytes ≥ 0")
    return int(gigabytes * 1e9)


@dataclass(frozen=True)
class Grammar:
    """A compiled guide, shared by all generations that use it. Thread-safe.

    Attributes:
        guide: what it was compiled from.
        backend: name of the engine that serves it.
        exact: whether the engine alone enforces everything the guide says. If not, a completion
            gate (`grammar_host.gate`) validates what is finished, so no invalid document is ever
            returned; but a generation may run into a dead end that an exact grammar avoids.
        notes: what was decided on the way, one sentence each.
        plan_seconds: wall time of finding the engine and compiling on trial.
        compile_seconds: wall time of the compilation that serves; like the other figures it stays
            with a cached grammar.
        memory_bytes: approximate size.
        tokenizer_info: the vocabulary that it was compiled for.
        owns_blanks: behind reasoning, whether blanks between it and the answer may be the answer's:
            they are if it may begin with one. Not of JSON, where they mean nothing.
    """

    guide: Guide
    backend: str
    exact: bool
    notes: tuple[str, ...]
    plan_seconds: float
    compile_seconds: float
    memory_bytes: int
    tokenizer_info: TokenizerInfo = field(repr=False)
    compiled: CompiledGuide = field(repr=False)
    owns_blanks: bool = False

    def matcher(self, stop_token_ids: Iterable[int] = ()) -> GrammarMatcher:
        """Starts a generation.

        Args:
            stop_token_ids: stop tokens of the request or the generation config, in addition to
                the tokenizer's. Like those, they are legal only where the text is complete; an
                ordinary token among them no longer counts as text.

        Raises:
            ValueError: a stop token outside of the vocabulary.
        """
        stops = frozenset(self.tokenizer_info.stop_token_ids) | frozenset(stop_token_ids)
        vocab_size = self.tokenizer_info.vocab_size
        if min(stops) < 0 or max(stops) >= vocab_size:
            raise ValueError(f"stop tokens {sorted(stops)} are not all within 0..{vocab_size - 1}")
        engine = self.compiled.new_matcher(stops)
        return GrammarMatcher(engine, vocab_size, stops, self.tokenizer_info.segmenter)


@dataclass(frozen=True)
class CompilerStats:
    """Counters since the compiler was made, and gauges.

    Attributes:
        cache_hits: guides answered from the cache, remembered failures included.
        cache_misses: guides that had to be compiled.
        coalesced: of the others, those that joined a compilation under way.
        failures: compilations that ended in an error.
        cached_grammars: grammars in the cache.
        cached_bytes: their approximate size together.
        compiling: guides being compiled now.
        compile_seconds: wall time from request to grammar or error, summed over the guides.
        service: the worker processes; None without isolation.
    """

    cache_hits: int
    cache_misses: int
    coalesced: int
    failures: int
    cached_grammars: int
    cached_bytes: int
    compiling: int
    compile_seconds: float
    service: ServiceStats | None


def _fail(future: Future[Grammar], error: GrammarError) -> None:
    with contextlib.suppress(InvalidStateError):  # done meanwhile
        future.set_exception(error)


_Key = tuple[str, Guide]


@dataclass(frozen=True)
class _Work:
    """A compilation under way.

    Attributes:
        key: the engine that was asked for, and the guide.
        future: what those who wait hold.
        started: `time.perf_counter()` of the request.
        engines: those still to be tried, one trial each.
        loaded: engines that the workers were told to load for it.
    """

    key: _Key
    future: Future[Grammar]
    started: float
    engines: tuple[str, ...]
    loaded: frozenset[str] = frozenset()


class GrammarCompiler:
    """Compiles guides for one vocabulary, with a byte-bounded least-recently-used cache.

    Thread-safe: identical guides that several threads ask for at once are compiled once, and all
    of them get the result or the error. A guide is first compiled on trial in a worker process,
    which is killed at the deadline or the memory limit; only what survives is compiled here.
    """

    def __init__(
        self,
        tokenizer_info: TokenizerInfo,
        backend: str | Backend = "auto",
        *,
        cache_limit_bytes: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES,
        isolation: Literal["process", "none"] = "process",
    ) -> None:
        """Prepares the compiler; no engine is imported before the first guide.

        Args:
            tokenizer_info: the vocabulary.
            backend: the engine that serves guides which do not ask for another: a name
                (`"auto"`, `"llguidance"`, `"xgrammar"`, `"outlines"`) or an instance, which is
                used in this process only.
            cache_limit_bytes: bound on the cached grammars' sizes together; 0 caches nothing.
                None reads the environment variable `XGRAMMAR_CACHE_LIMIT_GB` (default 1).
            timeout_s: deadline of a compilation, in seconds.
            memory_limit_bytes: how much memory a compilation may take, in bytes.
            isolation: `"process"` compiles on trial in a worker process; `"none"` has no deadline
                and no memory limit, and an engine that crashes takes this process with it.

        Raises:
            GuideError: an engine that is not served.
            ValueError: an invalid limit.
        """
        if cache_limit_bytes is None:
            cache_limit_bytes = cache_limit_from_environment()
        if cache_limit_bytes < 0:
            raise ValueError(f"cache_limit_bytes is at least 0, not {cache_limit_bytes}")
        if isolation not in ("process", "none"):
            raise ValueError(f"isolation is 'process' or 'none', not {isolation!r}")
        self._tokenizer_info = tokenizer_info
        self._cache_limit_bytes = cache_limit_bytes
        own = {backend.name: backend} if isinstance(backend, Backend) else {}
        self._own_engines = frozenset(own)
        self._default = backend.name if isinstance(backend, Backend) else backend
        self._planner = Planner(tokenizer_info, own)
        self._check_backend(self._default)
        self._service: CompileService | None = None
        if isolation == "process":
            self._service = CompileService(
                "grammar_host.plan:new_trial",
                tokenizer_info,
                timeout_s=timeout_s,
                memory_limit_bytes=memory_limit_bytes,
                workers=COMPILE_THREADS,
            )
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar-compiler")
        self._closers_lock = threading.Lock()
        self._shared_closers: Closers | None = None
        self._lock = threading.Lock()
        self._cache: OrderedDict[_Key, Grammar] = OrderedDict()
        self._failures: OrderedDict[_Key, tuple[float, GuideError]] = OrderedDict()
        self._in_flight: dict[_Key, Future[Grammar]] = {}
        self._cache_bytes = 0
        self._hits = self._misses = self._coalesced = self._failed = 0
        self._seconds = 0.0

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        """The vocabulary that this compiler compiles for."""
        return self._tokenizer_info

    @property
    def cache_bytes(self) -> int:
        """Approximate size of the cached grammars together."""
        return self._cache_bytes

    def start(self) -> None:
        """Starts the workers and loads an engine meanwhile, so that the first guide need not wait."""
        if self._service is not None:
            self._service.start()
        if self._default == "auto":
            self._threads.submit(self._planner.engine, FIRST_ENGINE)
            self._threads.submit(lambda: self._closers)

    def close(self) -> None:
        """Ends the worker processes; compilations under way fail with `CompileServiceError`."""
        if self._service is not None:
            self._service.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = list(self._in_flight.values())
            self._in_flight.clear()
        for future in left:
            _fail(future, CompileServiceError(_CLOSED))

    def compile(self, guide: Guide, backend: str | None = None) -> Grammar:
        """Compiles a guide, or takes it from the cache.

        Args:
            guide: what to enforce.
            backend: name of the engine for this guide; None takes the compiler's own.

        Raises:
            GuideError: the guide is invalid, not supported, too complex, or no text satisfies it;
                or an engine that is not served.
        """
        return self.submit(guide, backend).result()

    def submit(self, guide: Guide, backend: str | None = None) -> Future[Grammar]:
        """The same off the caller's thread: returns at once.

        The future raises what `compile` raises. It cannot be cancelled: others may wait for it.

        Raises:
            GuideError: an engine that is not served.
        """
        name = self._default if backend is None else backend
        self._check_backend(name)
        key = (name, guide)
        with self._lock:
            known = self._known(key)
            if known is not None:
                self._hits += 1
                return known
            future = self._in_flight.get(key)
            if future is not None:
                self._coalesced += 1
                return future
            self._misses += 1
            future = self._in_flight[key] = Future()
            future.set_running_or_notify_cancel()  # others may wait for it: nobody can cancel it
        self._begin(_Work(key, future, time.perf_counter(), engines=(name,)))
        return future

    def stats(self) -> CompilerStats:
        """A snapshot of the counters."""
        with self._lock:
            return CompilerStats(
                cache_hits=self._hits,
                cache_misses=self._misses,
                coalesced=self._coalesced,
                failures=self._failed,
                cached_grammars=len(self._cache),
                cached_bytes=self._cache_bytes,
                compiling=len(self._in_flight),
                compile_seconds=self._seconds,
                service=None if self._service is None else self._service.stats(),
            )

    @property
    def _closers(self) -> Closers:
        with self._closers_lock:
            if self._shared_closers is None:
                self._shared_closers = Closers(self._tokenizer_info)
            return self._shared_closers

    def _check_backend(self, name: str) -> None:
        if name not in self._own_engines:
            check_backend_name(name)

    def _known(self, key: _Key) -> Future[Grammar] | None:
        """The grammar or the recent failure of a guide, as a future that is done."""
        future: Future[Grammar] = Future()
        cached = self._cache.get(key)
        if cached is not None:
            self._cache.move_to_end(key)
            future.set_result(cached)
            return future
        failed_at, error = self._failures.get(key, (-math.inf, None))
        if error is None or time.monotonic() - failed_at > FAILURE_SECONDS:
            return None
        future.set_exception(copy.copy(error))  # each raising adds to an error's traceback
        return future

    def _begin(self, work: _Work) -> None:
        """Puts the trial of a guide into a worker, or the whole compilation onto a thread."""
        try:
            if self._service is None or work.engines[0] in self._own_engines:
                self._threads.submit(self._finish, work, None)
                return
            guide = work.key[1]
            job = self._service.submit(guide, work.engines[0], param=guide.param)
            job.add_done_callback(lambda trial: self._after_trial(work, trial))
        except GrammarError as error:  # no process can be started
            self._settle(work, error)
        except RuntimeError:  # the threads have been shut down
            self._settle(work, CompileServiceError(_CLOSED))

    def _after_trial(self, work: _Work, trial: Future[Plan]) -> None:
        try:
            self._threads.submit(self._finish, work, trial)
        except RuntimeError:  # shut down, perhaps with the interpreter
            self._settle(work, CompileServiceError(_CLOSED))

    def _finish(self, work: _Work, trial: Future[Plan] | None) -> None:
        """Compiles what has been planned; runs on a thread of the compiler."""
        try:
            self._settle(work, self._build(work, trial))
        except EngineNotLoaded as missing:
            if self._service is None or missing.engine in work.loaded:
                reason = f"{missing.engine} cannot be loaded"
                self._settle(work, UnsupportedGuideError("backend", reason))
            else:
                self._service.preload(missing.engine)
                self._begin(replace(work, loaded=work.loaded | {missing.engine}))
        except CompileCrashError as error:
            # The crash did not say whose it was, so each engine gets a trial of its own.
            left = AUTO[work.key[1].kind] if work.engines == ("auto",) else work.engines[1:]
            if left:
                self._begin(replace(work, engines=left))
            else:
                self._settle(work, error)
        except GuideError as error:
            if len(work.engines) > 1:
                self._begin(replace(work, engines=work.engines[1:]))
            else:
                self._settle(work, error)
        except ImportError as error:
            self._settle(work, CompileServiceError(f"{work.engines[0]}: {error}"))
        except BaseException as error:  # whatever it is, the threads that wait must not hang
            self._settle(work, error)

    def _build(self, work: _Work, trial: Future[Plan] | None) -> Grammar:
        guide = work.key[1]
        if trial is None:
            plan, compiled = self._planner.plan(guide, work.engines[0])
            planned = time.perf_counter()
        else:
            plan = trial.result()
            planned = time.perf_counter()
            compiled = self._planner.compile(plan)
        new_matcher = self._gated(plan, compiled)
        owns_blanks = (
            guide.reasoning_end is not None
            and guide.kind not in ("json", "json_schema")
            and may_begin_with_blank(new_matcher, self._tokenizer_info, guide.reasoning_end)
        )
        new_matcher = self._behind_reasoning(guide, new_matcher)
        # The texts live as long as the grammar.
        texts = {guide.text, plan.guide.text}
        gated = len(plan.gate or "") + sum(len(schema) for _, schema in plan.tags)
        memory_bytes = (
            compiled.memory_bytes + sum(map(len, texts)) + GATE_BYTES_PER_CHARACTER * gated
        )
        return Grammar(
            guide=guide,
            backend=plan.backend,
            exact=plan.exact,
            notes=plan.notes,
            plan_seconds=planned - work.started,
            compile_seconds=time.perf_counter() - planned,
            memory_bytes=memory_bytes,
            tokenizer_info=self._tokenizer_info,
            compiled=CompiledGuide(new_matcher, memory_bytes),
            owns_blanks=owns_blanks,
        )

    def _gated(self, plan: Plan, compiled: CompiledGuide) -> NewMatcher:
        """Puts the gate in front of the engine's matchers."""
        new_matcher = compiled.new_matcher
        if plan.gate is not None:
            document = json.loads(plan.gate)
            new_matcher = with_gate(new_matcher, document, self._tokenizer_info, self._closers)
        if plan.tags:
            schemas = {begin: json.loads(document) for begin, document in plan.tags}
            info = self._tokenizer_info
            named = named_special_tokens(plan.guide, info)
            new_matcher = with_tag_gate(
                new_matcher, schemas, info, self._closers, special_tokens=named
            )
        return new_matcher

    def _behind_reasoning(self, guide: Guide, new_matcher: NewMatcher) -> NewMatcher:
        """Puts the reasoning phase, if there is one, in front of that."""
        info, end, start = self._tokenizer_info, guide.reasoning_end, guide.reasoning_start
        if end is None:
            return new_matcher
        if start is None:
            return with_reasoning(new_matcher, info, end)
        return with_optional_reasoning(new_matcher, info, start, end)

    def _settle(self, work: _Work, outcome: Grammar | BaseException) -> None:
        if isinstance(outcome, Exception) and not isinstance(outcome, GrammarError):
            # A bug, of an engine or of ours. Callers are promised one family of errors.
            kind = type(outcome).__name__
            bug = CompileCrashError(work.key[1].param, f"the guide led to an internal {kind}")
            bug.__cause__ = outcome
            outcome = bug
        with self._lock:
            if self._in_flight.pop(work.key, None) is not work.future:
                return  # closed meanwhile
            self._seconds += time.perf_counter() - work.started
            if isinstance(outcome, Grammar):
                self._remember(work.key, outcome)
            else:
                self._failed += 1
                if isinstance(outcome, GuideError):
                    self._failures[work.key] = time.monotonic(), copy.copy(outcome)
                    self._failures.move_to_end(work.key)
                    while len(self._failures) > MAX_FAILURES:
                        self._failures.popitem(last=False)
        if isinstance(outcome, Grammar):
            work.future.set_result(outcome)
        else:
            work.future.set_exception(outcome)

    def _remember(self, key: _Key, grammar: Grammar) -> None:
        self._failures.pop(key, None)
        if grammar.memory_bytes > self._cache_limit_bytes:
            return
        self._cache[key] = grammar
        self._cache_bytes += grammar.memory_bytes
        while self._cache_bytes > self._cache_limit_bytes:
            _, oldest = self._cache.popitem(last=False)
            self._cache_bytes -= oldest.memory_bytes
