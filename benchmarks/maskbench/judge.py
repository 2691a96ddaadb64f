"""One problem under one engine: every instance token by token, with a clock beside each call."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.maskbench.problems import Instance, Problem
from grammar_host import (
    Grammar,
    GrammarCompiler,
    GrammarError,
    GrammarMatcher,
    Guide,
    allocate_token_bitmask,
)

Encode = Callable[[str], Sequence[int]]
"""From a text to token ids, without a stop token."""

Verdict = Literal["accepted", "rejected", "failed"]

CRASH = "crash"
"""The code of whatever is no `GrammarError`: the engine's bug, or its process that died."""

_CONTEXT = 40


@dataclass
class Ruling:
    """What became of an instance.

    Attributes:
        token: index of the token at which a rejected instance was rejected, the stop token being
            the last one; the number of tokens if it was accepted.
        tokens: tokens of the instance, stop token included.
        context: for a rejection the text before it and the token that was not allowed.
    """

    description: str
    valid: bool
    verdict: Verdict
    token: int
    tokens: int
    context: str = ""

    @property
    def right(self) -> bool:
        return self.verdict == ("accepted" if self.valid else "rejected")


@dataclass
class Outcome:
    """A problem under an engine, ready for JSON.

    Attributes:
        served_by: the engine that served it; None if it was refused.
        exact: whether the engine's grammar alone decides, without the completion gate.
        notes: of the grammar: what was decided about it.
        code: of the refusal; None if it compiled.
        reason: the message of the refusal.
        compile_ms: wall time of compiling, or of refusing.
        first_mask_ms: the same and the first mask; None if it was refused.
        mask_us: wall time of each mask.
        accept_us: wall time of each accepted token.
    """

    name: str
    served_by: str | None = None
    exact: bool = True
    notes: tuple[str, ...] = ()
    code: str | None = None
    reason: str = ""
    rulings: list[Ruling] = field(default_factory=list)
    compile_ms: float = 0.0
    first_mask_ms: float | None = None
    mask_us: list[float] = field(default_factory=list)
    accept_us: list[float] = field(default_factory=list)

    @property
    def fully_right(self) -> bool:
        """It compiled, and every instance got the right verdict."""
        return self.code is None and all(ruling.right for ruling in self.rulings)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Outcome":
        rulings = [Ruling(**ruling) for ruling in value["rulings"]]
        return cls(**value | {"rulings": rulings, "notes": tuple(value["notes"])})


def judge(problem: Problem, compiler: GrammarCompiler, backend: str, encode: Encode) -> Outcome:
    """Compile the problem's schema and try all its instances. Raises nothing.

    Args:
        compiler: one without a cache, so that every schema is compiled.
        backend: the engine to ask for.
        encode: the tokenizer that belongs to the compiler's vocabulary.
    """
    outcome = Outcome(problem.name)
    started = time.perf_counter()
    try:
        grammar = compiler.compile(Guide.json_schema(problem.schema), backend=backend)
        outcome.compile_ms = _since(started) * 1e3
        mask = allocate_token_bitmask(1, grammar.tokenizer_info.vocab_size)
        grammar.matcher().fill_next_token_bitmask(mask)
        outcome.first_mask_ms = _since(started) * 1e3
    except Exception as error:
        outcome.compile_ms = _since(started) * 1e3
        outcome.code, outcome.reason = _code(error), _one_line(error)
        return outcome
    outcome.served_by, outcome.exact = grammar.backend, grammar.exact
    outcome.notes = grammar.notes
    for instance in problem.instances:
        outcome.rulings.append(_try(instance, grammar, encode, outcome))
    return outcome


def _try(instance: Instance, grammar: Grammar, encode: Encode, outcome: Outcome) -> Ruling:
    tokens = [*encode(instance.text), min(grammar.tokenizer_info.stop_token_ids)]
    ruling = Ruling(instance.description, instance.valid, "accepted", 0, len(tokens))
    try:
        matcher = grammar.matcher()
        for token in tokens:
            if not _step(matcher, token, outcome):
                ruling.verdict = "rejected"
                ruling.context = _around(tokens, ruling.token, grammar)
                break
            ruling.token += 1
    except Exception as error:
        ruling.verdict, ruling.context = "failed", _one_line(error)
    return ruling


def _step(matcher: GrammarMatcher, token: int, outcome: Outcome) -> bool:
    """Fills a mask; whether it allows the token, which is accepted then."""
    mask = allocate_token_bitmask(1, matcher.vocab_size)
    started = time.perf_counter()
    matcher.fill_next_token_bitmask(mask)
    outcome.mask_us.append(round(_since(started) * 1e6, 2))
    legal = bool(mask[0, token // 32] >> token % 32 & 1)
    started = time.perf_counter()
    accepted = matcher.accept_token(token)
    elapsed = _since(started)
    if accepted != legal:
        raise RuntimeError(f"the mask says {legal}, accept_token says {accepted}")
    if accepted:
        outcome.accept_us.append(round(elapsed * 1e6, 2))
    return accepted


def _around(tokens: Sequence[int], index: int, grammar: Grammar) -> str:
    vocabulary = grammar.tokenizer_info.vocabulary
    before = b"".join(vocabulary[token] for token in tokens[:index]).decode(errors="replace")
    refused = vocabulary[tokens[index]].decode(errors="replace")
    return f"{before[-_CONTEXT:]}▸{refused or 'stop'}"


def _code(error: Exception) -> str:
    return error.code if isinstance(error, GrammarError) else CRASH


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, GrammarError) else f"{type(error).__name__}: {text}"


def _since(started: float) -> float:
    return time.perf_counter() - started
