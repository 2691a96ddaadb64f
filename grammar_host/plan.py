"""From a guide to the engine that enforces all of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from grammar_host.backends import SERVED_BACKENDS
from grammar_host.backends.base import Backend, CompiledGuide
from grammar_host.bitmask import allocate_token_bitmask
from grammar_host.errors import (
    EmptyLanguageError,
    GrammarTooComplexError,
    GuideError,
)
from grammar_host.guide import Guide
from grammar_host.matcher import GrammarMatcher
from grammar_host.schema import INEXACT, read_schema, versions
from grammar_host.tokenizer import TokenizerInfo

AUTO: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "json": ("llguidance", "xgrammar"),
        "json_schema": ("llguidance", "xgrammar"),
        "regex": ("llguidance", "xgrammar"),
        "choice": ("llguidance", "xgrammar"),
        "lark": ("llguidance", "xgrammar"),
        "grammar": ("xgrammar", "llguidance"),
        "structural_tag": ("xgrammar",),
    }
)
"""Which engines `auto` asks, in this order. LLGuidance compiles in a millisecond and refuses what
it cannot enforce; EBNF and structural tags are XGrammar's own languages."""

MAX_POINTERS = 20
"""Parts of a schema that a note lists by name."""


@dataclass(frozen=True)
class Plan:
    """How a guide is going to be enforced. Small and picklable.

    Attributes:
        backend: the engine.
        guide: what the engine compiles; for a schema perhaps another one than the caller's, that
            every valid document satisfies.
        gate: JSON of the schema that completed documents are validated against; None if what the
            engine compiles is exact.
        notes: what was decided, one sentence each.
    """

    backend: str
    guide: Guide
    gate: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the engine alone enforces everything."""
        return self.gate is None


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

    def plan(self, guide: Guide, backend: str) -> Plan:
        """Finds an engine, and compiles the guide and its first mask on trial.

        Args:
            guide: what to enforce.
            backend: an engine's name, or `"auto"`.

        Raises:
            GuideError: no engine enforces it; of several reasons the first engine's.
        """
        names = AUTO[guide.kind] if backend == "auto" else (backend,)
        first: GuideError | None = None
        for name in names:
            try:
                return self._plan_for(guide, name)
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
        if name not in self._engines:
            self._engines[name] = SERVED_BACKENDS[name](self._tokenizer_info)
        return self._engines[name]

    def _plan_for(self, guide: Guide, backend: str) -> Plan:
        if guide.kind == "json_schema" and backend in INEXACT:
            return self._plan_schema(guide, backend)
        self._try(guide, backend)
        return Plan(backend, guide)

    def _plan_schema(self, guide: Guide, backend: str) -> Plan:
        schema = read_schema(guide.document, strict=guide.strict)

        def compiles(document: object) -> bool:
            try:
                self.engine(backend).compile(_with_schema(guide, document))
            except GuideError:
                return False
            return True

        first: GuideError | None = None
        for version in versions(schema, backend, compiles):
            offered = _with_schema(guide, version.document)
            try:
                self._try(offered, backend)
            except GuideError as error:
                first = first or error
                continue
            if not version.inexact:
                return Plan(backend, offered, notes=schema.notes)
            gate = json.dumps(schema.document, ensure_ascii=False)
            notes = (*schema.notes, _gate_note(version.inexact))
            return Plan(backend, offered, gate, notes)
        assert first is not None
        raise first

    def _try(self, guide: Guide, backend: str) -> None:
        compiled = self.engine(backend).compile(guide)
        require_first_token(guide, compiled, self._tokenizer_info)


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
        return replace(guide, text=text, strict=False, reasoning_end=None)
    except GuideError:  # rewriting may add levels or text: over the limits, the engine is not asked
        raise GrammarTooComplexError(guide.param, "too large once it is rewritten") from None


def _gate_note(inexact: tuple[str, ...]) -> str:
    listed = ", ".join(inexact[:MAX_POINTERS]) + (", …" if len(inexact) > MAX_POINTERS else "")
    return f"checked when a document is completed, not token by token: {listed}"
