"""From guides to grammars: routing, caching, coalescing."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from grammar_host.backends import SERVED_BACKENDS, resolve_backend_name
from grammar_host.backends.base import Backend, CompiledGuide
from grammar_host.bitmask import allocate_token_bitmask
from grammar_host.errors import EmptyLanguageError
from grammar_host.guide import Guide
from grammar_host.matcher import GrammarMatcher
from grammar_host.tokenizer import TokenizerInfo

CACHE_LIMIT_VARIABLE = "XGRAMMAR_CACHE_LIMIT_GB"
"""Environment variable with the cache limit in GB (10⁹ bytes), as in TensorRT-LLM; default 1."""


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
        compile_seconds: wall time of the compilation; a cached grammar keeps the original figure.
        memory_bytes: approximate size.
        tokenizer_info: the vocabulary that it was compiled for.
    """

    guide: Guide
    backend: str
    compile_seconds: float
    memory_bytes: int
    tokenizer_info: TokenizerInfo = field(repr=False)
    compiled: CompiledGuide = field(repr=False)

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
        return GrammarMatcher(self.compiled.new_matcher(stops), vocab_size, stops)


class GrammarCompiler:
    """Compiles guides for one vocabulary, with a byte-bounded least-recently-used cache.

    Thread-safe: identical guides that several threads ask for at once are compiled once, and all
    of them get the result or the error. Errors are not cached.
    """

    def __init__(
        self,
        tokenizer_info: TokenizerInfo,
        backend: str | Backend = "auto",
        *,
        cache_limit_bytes: int | None = None,
    ) -> None:
        """Prepares the compiler; no engine is imported before the first guide.

        Args:
            tokenizer_info: the vocabulary.
            backend: the engine that serves guides which do not ask for another: a name
                (`"auto"`, `"xgrammar"`) or an instance.
            cache_limit_bytes: bound on the cached grammars' sizes together; 0 caches nothing.
                None reads the environment variable `XGRAMMAR_CACHE_LIMIT_GB` (default 1).

        Raises:
            ValueError: an engine that is not served, or an invalid limit.
        """
        if cache_limit_bytes is None:
            cache_limit_bytes = cache_limit_from_environment()
        if cache_limit_bytes < 0:
            raise ValueError(f"cache_limit_bytes is at least 0, not {cache_limit_bytes}")
        self._tokenizer_info = tokenizer_info
        self._cache_limit_bytes = cache_limit_bytes
        self._backends: dict[str, Backend] = {}
        if isinstance(backend, Backend):
            self._backends[backend.name] = backend
            self._default = backend.name
        else:
            self._default = resolve_backend_name(backend)
        self._lock = threading.Lock()
        self._backend_lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, Guide], Grammar] = OrderedDict()
        self._cache_bytes = 0
        self._in_flight: dict[tuple[str, Guide], Future[Grammar]] = {}

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        """The vocabulary that this compiler compiles for."""
        return self._tokenizer_info

    @property
    def cache_bytes(self) -> int:
        """Approximate size of the cached grammars together."""
        return self._cache_bytes

    def compile(self, guide: Guide, backend: str | None = None) -> Grammar:
        """Compiles a guide, or takes it from the cache.

        Args:
            guide: what to enforce.
            backend: name of the engine for this guide; None takes the compiler's own.

        Raises:
            GuideError: the guide is invalid, not supported, or no text satisfies it.
            ValueError: an engine that is not served; the message lists what is.
        """
        key = (self._resolve(backend), guide)
        with self._lock:
            cached = self._cache.get(key)
            if cached is not None:
                self._cache.move_to_end(key)
                return cached
            future = self._in_flight.get(key)
            owner = future is None
            if future is None:
                future = self._in_flight[key] = Future()
        if owner:
            self._compile_for(key, future)
        return future.result()

    def _resolve(self, backend: str | None) -> str:
        if backend is None:
            return self._default
        return backend if backend in self._backends else resolve_backend_name(backend)

    def _compile_for(self, key: tuple[str, Guide], future: Future[Grammar]) -> None:
        try:
            grammar = self._compile(*key)
        except BaseException as error:  # whatever it is, the threads that wait must not hang
            with self._lock:
                del self._in_flight[key]
            future.set_exception(error)
        else:
            with self._lock:
                del self._in_flight[key]
                self._remember(key, grammar)
            future.set_result(grammar)

    def _compile(self, backend: str, guide: Guide) -> Grammar:
        engine = self._engine(backend)
        started = time.perf_counter()
        compiled = engine.compile(guide)
        grammar = Grammar(
            guide,
            backend,
            time.perf_counter() - started,
            # The guide's text lives as long as its grammar.
            compiled.memory_bytes + len(guide.text),
            self._tokenizer_info,
            compiled,
        )
        _require_first_token(grammar)
        return grammar

    def _engine(self, name: str) -> Backend:
        with self._backend_lock:
            if name not in self._backends:
                self._backends[name] = SERVED_BACKENDS[name](self._tokenizer_info)
            return self._backends[name]

    def _remember(self, key: tuple[str, Guide], grammar: Grammar) -> None:
        if grammar.memory_bytes > self._cache_limit_bytes:
            return
        self._cache[key] = grammar
        self._cache_bytes += grammar.memory_bytes
        while self._cache_bytes > self._cache_limit_bytes:
            _, oldest = self._cache.popitem(last=False)
            self._cache_bytes -= oldest.memory_bytes


def _require_first_token(grammar: Grammar) -> None:
    """Refuses a grammar under which a generation could not even begin."""
    matcher = grammar.matcher()
    if matcher.is_completed():
        # The empty text is no JSON; engines that offer it have run out of alternatives.
        if grammar.guide.kind in ("json", "json_schema"):
            raise EmptyLanguageError(grammar.guide.param, "no document satisfies it")
        return
    row = allocate_token_bitmask(1, matcher.vocab_size)
    matcher.fill_next_token_bitmask(row, 0)
    if not np.any(row):
        raise EmptyLanguageError(
            grammar.guide.param, "no token of the vocabulary can begin a text that satisfies it"
        )
