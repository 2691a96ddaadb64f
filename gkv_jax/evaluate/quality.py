"""The quality of caches, measured: every policy against the full cache, on trained weights."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gkv_jax.errors import UserError
from gkv_jax.evaluate import caches, tasks
from gkv_jax.evaluate.dense import reference_nll
from gkv_jax.evaluate.fidelity import Continuation, continuation, fidelity
from gkv_jax.evaluate.journal import Journal, circumstances
from gkv_jax.evaluate.perplexity import perplexity, streaming_nll
from gkv_jax.evaluate.plan import Cell, Measure, Plan, fidelity_cells, retrieval_cells, stream_cells
from gkv_jax.evaluate.runner import Runner
from gkv_jax.models.protocol import Decoder, Params

LEAST_SCORE = 0.5
"""A task that the full cache solves less often says nothing about the other caches."""
BIN = 256
"""Tokens per point of a curve of perplexity over position."""

_LONGEST_PART = 4096


@dataclasses.dataclass(frozen=True)
class CacheQuality:
    """Results: for each cell, its values.

    Attributes:
      plan: what was asked for.
      values: cells in order of measurement. Values are those of

        - retrieval: ``score`` (mean share of right answers) and ``answers`` (the texts);
        - fidelity: the fields of ``Fidelity``, each a mean over the prompts;
        - perplexity: ``all``, ``first`` and ``last`` (parts of ``part`` tokens beyond the budget),
          ``afresh`` (the last part again, in a text that begins two budgets before it; None for what
          evicts nothing), and ``curve``, the mean nats of every ``BIN`` tokens;
        - reference: ``streamed`` and ``dense``, the perplexity of one text through the cache and by
          the definition, and ``most``, the largest difference of one token, in nats.
      unsolved: (task, length) that the full cache solves too rarely, with its score.
    """

    plan: Plan
    values: dict[Cell, dict[str, Any]]
    unsolved: dict[tuple[str, int], float]

    def find(self, measure: Measure, **fields: Any) -> dict[Cell, dict[str, Any]]:
        """Cells of one measure whose fields have these values."""
        return {
            cell: values
            for cell, values in self.values.items()
            if cell.measure == measure
            and all(getattr(cell, name) == value for name, value in fields.items())
        }

    def score(self, policy: str, budget: int | None, task: str, length: int) -> float | None:
        """Mean retrieval score over the depths; None where it was not measured."""
        found = self.find("retrieval", policy=policy, budget=budget, task=task, length=length)
        return float(np.mean([v["score"] for v in found.values()])) if found else None

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON can say it."""
        return {
            "plan": dataclasses.asdict(self.plan),
            "unsolved": [
                {"task": task, "length": length, "full": score}
                for (task, length), score in self.unsolved.items()
            ],
            "cells": [dataclasses.asdict(cell) | values for cell, values in self.values.items()],
        }


def cache_quality(
    model: Decoder,
    params: Params,
    tokenizer: Any,
    plan: Plan,
    prose: str,
    *,
    stop_token_ids: Sequence[int] = (),
    journal: Path | None = None,
    progress: Callable[[str], Any] | None = None,
) -> CacheQuality:
    """Measure the quality of caches.

    Args:
      model: the architecture.
      params: its parameters, trained.
      tokenizer: a transformers tokenizer.
      plan: what to measure.
      prose: a long text: a haystack, something to summarise, and the text whose perplexity counts.
      stop_token_ids: ends of an answer besides the tokenizer's own.
      journal: file of finished cells, which are not measured again by a later call for the same
        model, code and seed.
      progress: told the key of each cell before it is measured.

    Raises:
      UserError: prompts that the model was not trained for, that do not hold a question, or prose
        that is too short; nothing has been computed then.
    """
    bench = _Bench(model, params, tokenizer, plan, prose, frozenset(stop_token_ids))
    bench.check()
    notes = Journal(
        journal,
        circumstances(
            model, params, tokenizer, prose, bench.stops,
            plan.samples, plan.prompts, plan.continuation, plan.seed,
        ),
    )  # fmt: skip
    values: dict[Cell, dict[str, Any]] = {}

    def measure(cells: Iterator[Cell]) -> None:
        for cell in cells:
            if progress is not None:
                progress(cell.key)
            found = notes.find(cell.key)
            if found is None:
                found = bench.measure(cell)
                notes.record(cell.key, found)
            values[cell] = found

    measure(retrieval_cells("full", None, plan, plan.questions))
    quality = CacheQuality(plan, values, {})
    for task, length in plan.questions:
        score = quality.score("full", None, task, length)
        assert score is not None
        if score < LEAST_SCORE:
            quality.unsolved[task, length] = score
    solved = [each for each in plan.questions if each not in quality.unsolved]
    for policy, budget in plan.others:
        measure(retrieval_cells(policy, budget, plan, solved))
        measure(fidelity_cells(policy, budget, plan))
    measure(stream_cells(plan, model))
    return quality


@dataclasses.dataclass(frozen=True)
class _Bench:
    """What the measures share. Prompts and the full cache's continuations are made once."""

    model: Decoder
    params: Params
    tokenizer: Any
    plan: Plan
    prose: str
    stop_token_ids: frozenset[int]
    samples: dict[tuple[str, int, float, int], tasks.Sample] = dataclasses.field(
        default_factory=dict
    )
    continuations: dict[tuple[int, int], Continuation] = dataclasses.field(default_factory=dict)

    @property
    def stops(self) -> frozenset[int]:
        return self.stop_token_ids | ({self.tokenizer.eos_token_id} - {None})

    def check(self) -> None:
        """Build every prompt once: what cannot be built is found before the first forward pass."""
        plan, trained = self.plan, self.model.max_positions
        most = trained - plan.longest_answer
        for length in plan.lengths:
            if length > most:
                raise UserError(
                    f"lengths: {length} and an answer exceed the {trained} positions that the model "
                    f"was trained for; use at most {most}"
                )
        for cell in retrieval_cells("full", None, plan, plan.questions):
            for index in range(plan.samples):
                self.sample(cell, index)
        for length, index in itertools.product(plan.lengths, range(plan.prompts)):
            self.summary(length, index)
        if plan.stream and len(self.text) < plan.stream:
            raise UserError(
                f"stream: the text has {len(self.text)} tokens; use at most as many, not {plan.stream}"
            )

    def prompted(self, policy: str, budget: int | None, length: int) -> Runner:
        """A runner for prompts of ``length``: one program for every measure."""
        spec = caches.cache_spec(policy, budget, length + self.plan.longest_answer)
        return Runner(self.model, self.params, spec)

    @functools.cached_property
    def text(self) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(self.prose, verbose=False)
        return tokens

    def sample(self, cell: Cell, index: int) -> tasks.Sample:
        assert cell.task is not None
        assert cell.depth is not None
        key = (cell.task, cell.length, cell.depth, index)
        if key not in self.samples:
            # The same questions at every depth and length, so that nothing else differs.
            seed = self.plan.seed * 1000 + index
            self.samples[key] = tasks.build(
                cell.task, self.tokenizer, cell.length, cell.depth, seed, self.prose
            )
        return self.samples[key]

    def summary(self, length: int, index: int) -> tasks.Sample:
        return tasks.summary(self.tokenizer, length, self.plan.seed * 1000 + index, self.prose)

    def full(self, length: int, index: int) -> Continuation:
        """The full cache's continuation of a prompt, for all policies."""
        if (length, index) not in self.continuations:
            runner = self.prompted("full", None, length)
            prompt = self.summary(length, index).prompt
            self.continuations[length, index] = continuation(runner, prompt, self.plan.continuation)
        return self.continuations[length, index]

    def measure(self, cell: Cell) -> dict[str, Any]:
        measures = {
            "retrieval": self._retrieval,
            "fidelity": self._fidelity,
            "perplexity": self._perplexity,
            "reference": self._reference,
        }
        return measures[cell.measure](cell)

    def _retrieval(self, cell: Cell) -> dict[str, Any]:
        assert cell.task is not None
        new_tokens = tasks.TASKS[cell.task].new_tokens
        runner = self.prompted(cell.policy, cell.budget, cell.length)
        scores, answers = [], []
        for index in range(self.plan.samples):
            sample = self.sample(cell, index)
            output = runner.continue_greedily(sample.prompt, new_tokens, self.stops)
            answers.append(self.tokenizer.decode(output))
            scores.append(tasks.score(sample.answers, answers[-1]))
        return {"score": float(np.mean(scores)), "answers": answers}

    def _fidelity(self, cell: Cell) -> dict[str, Any]:
        runner = self.prompted(cell.policy, cell.budget, cell.length)
        each = [
            dataclasses.asdict(fidelity(runner, self.full(cell.length, index)))
            for index in range(self.plan.prompts)
        ]
        return {name: float(np.mean([one[name] for one in each])) for name in each[0]}

    def _perplexity(self, cell: Cell) -> dict[str, Any]:
        # What holds everything is measured as far as it was trained; the others to the end.
        bounded = caches.is_bounded(cell.policy) and cell.policy != "quest"
        limit = (
            cell.length if bounded else min(cell.length, self.model.max_positions, _LONGEST_PART)
        )
        spec = caches.cache_spec(cell.policy, cell.budget, limit)
        if spec.selector is not None:  # there is no prompt to choose from as a whole
            spec = dataclasses.replace(spec, prefill="chunks")
        text = self.text[:limit]
        nll = streaming_nll(self.model, self.params, text, spec, chunk=spec.prefill_chunk)
        beyond = nll[cell.budget or 0 :]
        part = min(_LONGEST_PART, len(beyond) // 2)
        afresh = None
        if bounded and cell.budget is not None:
            # Without all that came before: whether the cache has suffered, or the text is hard.
            end = text[-(part + 2 * cell.budget) :]
            again = streaming_nll(self.model, self.params, end, spec, chunk=spec.prefill_chunk)
            afresh = perplexity(again[-part:])
        return {
            "tokens": limit,
            "all": perplexity(nll),
            "part": part,
            "first": perplexity(beyond[:part]),
            "last": perplexity(beyond[-part:]),
            "afresh": afresh,
            "curve": [float(nll[i : i + BIN].mean()) for i in range(0, len(nll), BIN)],
        }

    def _reference(self, cell: Cell) -> dict[str, Any]:
        spec = caches.cache_spec(cell.policy, cell.budget, cell.length)
        text = self.text[: cell.length]
        streamed = streaming_nll(self.model, self.params, text, spec, chunk=spec.prefill_chunk)
        dense = reference_nll(self.model, self.params, text, spec)
        return {
            "streamed": perplexity(streamed),
            "dense": perplexity(dense),
            "most": float(np.abs(streamed - dense).max()),
        }
