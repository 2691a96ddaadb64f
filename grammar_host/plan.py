"""From a guide to the engine that enforces all of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from grammar_host.backends import SERVED_BACKENDS
from grammar_host.backends.base import Backend, CompiledGuide
from grammar_host.bitmask import allocate_token_bitmask
from grammar_host.errors import (
    EmptyLanguageError,
    GrammarError,
    GrammarTooComplexError,
    GuideError,
    UnsupportedGuideError,
)
from grammar_host.guide import Guide
from grammar_host.matcher import GrammarMatcher
from grammar_host.schema import INEXACT, read_schema, versions
from grammar_host.tag_schemas import prepare_tag_schemas
from grammar_host.tokenizer import TokenizerInfo

AUTO: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "json": ("llguidance", "xgrammar"),
        "json_schema": ("llguidance", "xgrammar"),
        "regex": ("llguidance", "outlines"),
        "choice": ("llguidance", "xgrammar"),
        "lark": ("llguidance", "xgrammar"),
        "grammar": ("xgrammar", "llguidance"),
        "structural_tag": ("xgrammar",),
    }
)
"""Which engines `auto` asks, in this order. LLGuidance compiles in a millisecond and refuses what
it cannot enforce; EBNF and structural tags are XGrammar's own languages. Regexes never go to
XGrammar unasked: it reads some of them as others."""

FIRST_ENGINE = "llguidance"
"""The engine that most guides end up with; quick to load."""

SLOW_TO_IMPORT = frozenset({"xgrammar"})
"""Engines that import torch."""

TRIAL_TOKENS = 12
"""Tokens that are written on trial under a compiled guide."""

MAX_POINTERS = 20
"""Parts of a schema that a note lists by name."""


@dataclass(frozen=True)
class Plan:
    """How a guide is going to be enforced. Small and picklable.

    Attributes:
        backend: the engine.
        guide: what the engine compiles; for a schema perhaps another one than the caller's, that
            every valid document satisfies.
        gate: JSON of the schema that documents are validated against (`Version.gate`); None if what
            the engine compiles is exact.
        notes: what was decided, one sentence each.
        tags: the same as `gate` inside of a structural tag: pairs of the text that begins a tag and
            JSON of the schema of what is behind it; empty if the engine is exact.
    """

    backend: str
    guide: Guide
    gate: str | None = None
    notes: tuple[str, ...] = ()
    tags: tuple[tuple[str, str], ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the engine alone enforces everything."""
        return self.gate is None and not self.tags


class EngineNotLoaded(Exception):
    """A trial needs an engine whose import takes too long to count against its deadline.

    Attributes:
        engine: its name.
    """

    def __init__(self, engine: str) -> None:
        super().__init__(engine)
        self.engine = engine


class Planner:
    """Decides how guides are enforced over one vocabulary, and proves that it works.

    Thread-safe if the engines are. Engines are loaded when they are first needed.
    """

    def __init__(
        self, tokenizer_info: TokenizerInfo, engines: Mapping[str, Backend] = MappingProxyType({})
    ) -> None:
        """Prepares the planner.

        Args:
            tokenizer_info: the vocabulary.
            engines: engines to use by name, beside and before those served by default.
        """
        self._tokenizer_info = tokenizer_info
        self._engines = dict(engines)
        # On trial: into every string, and far with every token. A stop token has no length.
        self._weights = np.array(
            [1000 if text == b'"' else len(text) for text in tokenizer_info.vocabulary]
        )
        self._lock = threading.Lock()

    def plan(
        self, guide: Guide, backend: str, *, ready: Callable[[str], bool] = lambda engine: True
    ) -> tuple[Plan, CompiledGuide]:
        """Finds an engine, and compiles the guide and its first mask.

        Args:
            guide: what to enforce.
            backend: an engine's name, or `"auto"`.
            ready: whether an engine may be used already.

        Returns:
            The plan, and what the engine made of `plan.guide`.

        Raises:
            EngineNotLoaded: the next engine to ask is not ready.
            GuideError: no engine enforces it; of several reasons the first engine's.
        """
        names = AUTO[guide.kind] if backend == "auto" else (backend,)
        first: GuideError | None = None
        for name in names:
            if not ready(name):
                raise EngineNotLoaded(name)
            try:
                if guide.kind == "json_schema" and name in INEXACT:
                    return self._plan_schema(guide, name)
                if guide.kind == "structural_tag" and name in INEXACT:
                    return self._plan_tag(guide, name)
                return Plan(name, guide), self._compile(guide, name)
            except EmptyLanguageError:
                raise
            except GuideError as error:
                first = first or error
        assert first is not None
        raise first

    def compile(self, plan: Plan) -> CompiledGuide:
        """Compiles what a plan says.

        Raises:
            GuideError: as the engine says; not for a plan that was just made.
        """
        return self.engine(plan.backend).compile(plan.guide)

    def engine(self, name: str) -> Backend:
        """The engine of that name."""
        with self._lock:
            if name not in self._engines:
                self._engines[name] = SERVED_BACKENDS[name](self._tokenizer_info)
            return self._engines[name]

    def _plan_schema(self, guide: Guide, backend: str) -> tuple[Plan, CompiledGuide]:
        schema = read_schema(guide.document, strict=guide.strict)

        def compiles(document: object) -> bool:
            try:
                self._try(_with_schema(guide, document), backend)
            except GuideError:
                return False
            return True

        errors: list[GuideError] = []
        for version in versions(schema, backend, compiles):
            try:
                offered = _with_schema(guide, version.document)
                compiled = self._try(offered, backend)
            except GuideError as error:
                errors.append(error)
                continue
            if not version.inexact:
                return Plan(backend, offered, notes=schema.notes), compiled
            gate = json.dumps(version.gate(schema), ensure_ascii=False)
            notes = (*schema.notes, _gate_note(version.inexact))
            return Plan(backend, offered, gate, notes), compiled
        # The last version is the weakest: if even that is empty, so is the schema.
        raise errors[-1] if isinstance(errors[-1], EmptyLanguageError) else errors[0]

    def _plan_tag(self, guide: Guide, backend: str) -> tuple[Plan, CompiledGuide]:
        tag = prepare_tag_schemas(guide, backend)
        offered = tag.guide.without_reasoning()
        notes = (_gate_note(tag.inexact),) if tag.inexact else ()
        plan = Plan(backend, offered, tag.whole, notes, tuple(tag.gated.items()))
        return plan, self._compile(offered, backend)

    def _compile(self, guide: Guide, backend: str) -> CompiledGuide:
        compiled = self.engine(backend).compile(guide)
        require_first_token(guide, compiled, self._tokenizer_info)
        return compiled

    def _try(self, guide: Guide, backend: str) -> CompiledGuide:
        """Compiles a guide and writes the first tokens of a text, to see what that costs.

        Raises:
            GuideError: the engine refuses it, at once or while it writes.
        """
        compiled = self._compile(guide, backend)
        info = self._tokenizer_info
        stops = frozenset(info.stop_token_ids)
        matcher = GrammarMatcher(compiled.new_matcher(stops), info.vocab_size, stops)
        row = allocate_token_bitmask(1, info.vocab_size)
        for _ in range(TRIAL_TOKENS):
            try:
                matcher.fill_next_token_bitmask(row, 0)
            except GuideError:
                raise
            except GrammarError as error:  # the engine failed, and would in a generation
                raise UnsupportedGuideError(guide.param, str(error)) from None
            legal = np.unpackbits(row.view(np.uint8), bitorder="little")[: info.vocab_size]
            token = int(np.argmax(legal * self._weights))
            if not legal[token] * self._weights[token] or not matcher.accept_token(token):
                break
        return compiled


class Trial:
    """`Planner.plan` as the task of a `CompileService`."""

    def __init__(self, tokenizer_info: TokenizerInfo) -> None:
        """Prepares the task in the process that workers are forked from."""
        self._planner = Planner(tokenizer_info)
        self._planner.engine(FIRST_ENGINE)
        self._preloaded: set[str] = set()

    def preload(self, engine: str) -> None:
        """Imports an engine, before the workers are forked."""
        self._planner.engine(engine)
        self._preloaded.add(engine)

    def __call__(self, guide: Guide, backend: str) -> Plan:
        """Plans a guide; called in a worker.

        Raises:
            EngineNotLoaded: preload it and try again.
            GuideError: as `Planner.plan`.
        """
        return self._planner.plan(guide, backend, ready=self._is_ready)[0]

    def _is_ready(self, engine: str) -> bool:
        return engine in self._preloaded or engine not in SLOW_TO_IMPORT


def new_trial(tokenizer_info: TokenizerInfo) -> Trial:
    """The task factory of `GrammarCompiler`'s service."""
    return Trial(tokenizer_info)


def require_first_token(
    guide: Guide, compiled: CompiledGuide, tokenizer_info: TokenizerInfo
) -> None:
    """Refuses a compiled guide under which a generation could not even begin.

    Raises:
        EmptyLanguageError: no token is legal at the start.
    """
    stops = frozenset(tokenizer_info.stop_token_ids)
    matcher = GrammarMatcher(compiled.new_matcher(stops), tokenizer_info.vocab_size, stops)
    if matcher.is_completed():
        # The empty text is no JSON; engines that offer it have run out of alternatives.
        if guide.kind in ("json", "json_schema"):
            raise EmptyLanguageError(guide.param, "no document satisfies it")
        return
    row = allocate_token_bitmask(1, matcher.vocab_size)
    matcher.fill_next_token_bitmask(row, 0)
    if not np.any(row):
        raise EmptyLanguageError(
            guide.param, "no token of the vocabulary can begin a text that satisfies it"
        )


def _with_schema(guide: Guide, document: object) -> Guide:
    try:
        text = json.dumps(document, ensure_ascii=False)
        return replace(guide.without_reasoning(), text=text, strict=False)
    except GuideError:  # rewriting may add levels or text: over the limits, the engine is not asked
        raise GrammarTooComplexError(guide.param, "too large once it is rewritten") from None


def _gate_note(inexact: tuple[str, ...]) -> str:
    listed = ", ".join(inexact[:MAX_POINTERS]) + (", …" if len(inexact) > MAX_POINTERS else "")
    return f"checked when a document is completed, not token by token: {listed}"
