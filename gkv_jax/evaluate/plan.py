"""What to measure, and the cells that a plan is made of."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

from gkv_jax.errors import UserError
from gkv_jax.evaluate import caches, tasks
from gkv_jax.models.protocol import Decoder

Measure = Literal["retrieval", "fidelity", "perplexity", "reference"]
_REFERENCE_BUDGETS = 3  # the length of the text with which streaming is checked, in budgets


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
      policies: names of ``caches.POLICIES``; ``full`` is always measured, first.
      budgets: tokens held per KV head. A text that fits a budget is not measured with it.
      tasks: names of ``tasks.TASKS``; none leaves retrieval out.
      lengths: tokens of the prompts. Just below a multiple of 512 needs the fewest programs.
      depths: places of the answer in the haystack, 0 to 1.
      samples: prompts per task, length and depth.
      prompts: prompts per length whose continuation is compared with the full cache's; 0 for none.
      continuation: tokens of these continuations.
      stream: tokens of the text whose perplexity is measured; 0 leaves it out.
      seed: of everything drawn.
    """

    policies: tuple[str, ...] = tuple(name for name in caches.POLICIES if name != "bf16")
    budgets: tuple[int, ...] = (256,)
    tasks: tuple[str, ...] = tuple(tasks.TASKS)
    lengths: tuple[int, ...] = (500, 1000)
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    samples: int = 3
    prompts: int = 2
    continuation: int = 32
    stream: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("policies", "budgets", "lengths", "depths"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty; name at least one")
        minima = {"samples": 1, "prompts": 0, "continuation": 1, "stream": 0}
        for name, minimum in minima.items():
            if getattr(self, name) < minimum:
                raise UserError(f"{name} is {getattr(self, name)}; it must be >= {minimum}")
        if 0 < self.stream < 3:
            raise UserError(f"stream is {self.stream}; it must be 0 or at least 3")
        if min(self.lengths) < 1:
            raise UserError(f"lengths: {min(self.lengths)} is too short; it must be >= 1")
        for task in self.tasks:
            tasks.task_named(task)
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise UserError(f"depths: {depth} is outside of 0..1")
        for policy, budget, length in itertools.product(self.policies, self.budgets, self.lengths):
            caches.cache_spec(policy, budget, length)

    @property
    def others(self) -> list[tuple[str, int | None]]:
        """Policies but ``full``, each with its budgets, or None where it has none."""
        return [
            (policy, budget)
            for policy in dict.fromkeys(self.policies)
            if policy != "full"
            for budget in (self.budgets if caches.is_bounded(policy) else (None,))
        ]

    @property
    def questions(self) -> list[tuple[str, int]]:
        """Every task at every length."""
        return list(itertools.product(self.tasks, self.lengths))

    @property
    def longest_answer(self) -> int:
        """Tokens that may follow a prompt."""
        return max([self.continuation, *(tasks.TASKS[task].new_tokens for task in self.tasks)])


@dataclasses.dataclass(frozen=True)
class Cell:
    """One measurement: which measure of which cache, on texts of which length.

    ``task`` and ``depth`` belong to retrieval; ``budget`` is None where a policy has none.
    """

    measure: Measure
    policy: str
    budget: int | None
    length: int
    task: str | None = None
    depth: float | None = None

    @property
    def key(self) -> str:
        """What it is called in a journal."""
        parts = (self.measure, self.task, self.policy, self.budget, self.length, self.depth)
        return "/".join("-" if part is None else str(part) for part in parts)


def most_cells(plan: Plan, model: Decoder) -> int:
    """Cells of a plan if the full cache solves every task; for a progress bar."""
    counts = [sum(1 for _ in retrieval_cells("full", None, plan, plan.questions))]
    for policy, budget in plan.others:
        counts.append(sum(1 for _ in retrieval_cells(policy, budget, plan, plan.questions)))
        counts.append(sum(1 for _ in fidelity_cells(policy, budget, plan)))
    return sum(counts) + sum(1 for _ in stream_cells(plan, model))


def retrieval_cells(
    policy: str, budget: int | None, plan: Plan, questions: Sequence[tuple[str, int]]
) -> Iterator[Cell]:
    """Cells of one cache for some ``(task, length)``, those that it holds anyway left out."""
    for (task, length), depth in itertools.product(questions, plan.depths):
        if budget is None or length > budget:
            yield Cell("retrieval", policy, budget, length, task, depth)


def fidelity_cells(policy: str, budget: int | None, plan: Plan) -> Iterator[Cell]:
    """Cells of one cache, likewise."""
    for length in plan.lengths if plan.prompts else ():
        if budget is None or length > budget:
            yield Cell("fidelity", policy, budget, length)


def stream_cells(plan: Plan, model: Decoder) -> Iterator[Cell]:
    """Perplexity of every cache that can read without end, and the reference where there is one."""
    if not plan.stream:
        return
    for policy, budget in [("full", None), *plan.others]:
        if caches.can_stream(policy) and (budget is None or plan.stream > 2 * budget):
            yield Cell("perplexity", policy, budget, plan.stream)
    if any(layer.window is not None for layer in model.layers):
        return  # the reference does not know them
    for policy, budget in plan.others:
        if policy in ("window", "sliding") and budget is not None:
            length = min(plan.stream, _REFERENCE_BUDGETS * budget)
            if length > 2 * budget:
                yield Cell("reference", policy, budget, length)
