"""``python -m benchmarks.fill``: what the grammars of a step cost the host.

All slots of a batch write documents, each at another position; a step advances every slot by one
token and fills the masks of the next. The same work is also done by two batches of half as many
slots on two threads: engines let go of Python's lock while they fill, so that this could be faster.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.common import (
    RESULTS,
    print_table,
    print_verdict,
    warn_if_busy,
    write_json,
)
from gkv_jax import UserError
from gkv_jax.weights import LoadedModel, load_model
from grammar_host import (
    Grammar,
    GrammarCompiler,
    Guide,
    GuidedBatch,
    GuideError,
    TokenizerInfo,
)

ENGINES = ("llguidance", "xgrammar", "outlines")
Summaries = dict[str, dict[str, float]]
"""For one thread and for two: medians and means by name."""

Results = dict[str, dict[str, Summaries]]
"""By task and engine."""

TARGET_MS = 0.5
"""For 8 slots under ``OBJECT``: small beside the forward pass of a small model on an accelerator."""


@dataclass(frozen=True)
class Task:
    """Guides with a document each; slot ``s`` has the guide ``s % len(guides)``."""

    guides: Sequence[Guide]
    documents: Sequence[str]


_STRING = {"type": "string"}


def _closed(properties: dict[str, Any]) -> Guide:
    return Guide.json_schema(
        {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    )


OBJECT = _closed(
    {
        "name": _STRING,
        "age": {"type": "integer"},
        "email": _STRING,
        "tags": {"type": "array", "items": _STRING},
        "kind": {"enum": ["person", "company"]},
    }
)
_OBJECT_DOCUMENT = (
    '{"name": "Ann Smith", "age": 42, "email": "ann@example.org", '
    '"tags": ["first", "second tag"], "kind": "person"}'
)
_BOUNDED = _closed({"code": {"type": "string", "pattern": "^[a-z]{3,40}$"}, "text": _STRING})
_BOUNDED_DOCUMENT = '{"code": "abcdefghijklmnop", "text": "and some more words"}'
_EXPRESSION = Guide.grammar(
    'root ::= term (("+" | "-" | "*") term)*\n'
    'term ::= [0-9]+ | "(" root ")" | [a-z]+ "(" root ("," root)* ")"'
)
_EXPRESSION_DOCUMENT = "foo(12+3*(4-bar(5,6,7)),x(1))*2+(((3)))"

TASKS = {
    "object": Task([OBJECT], [_OBJECT_DOCUMENT]),
    "long pattern": Task([_BOUNDED], [_BOUNDED_DOCUMENT]),
    "recursive EBNF": Task([_EXPRESSION], [_EXPRESSION_DOCUMENT]),
    "all three": Task(
        [OBJECT, _BOUNDED, _EXPRESSION],
        [_OBJECT_DOCUMENT, _BOUNDED_DOCUMENT, _EXPRESSION_DOCUMENT],
    ),
}


class Writers:
    """A batch all of whose slots write documents, over and over."""

    def __init__(
        self, grammars: Sequence[Grammar], documents: Sequence[Sequence[int]], slots: int
    ) -> None:
        """``documents`` are token ids, one document for each grammar."""
        vocab_size = grammars[0].tokenizer_info.vocab_size
        self._batch = GuidedBatch(slots, 0, vocab_size)
        self._masks = np.zeros(self._batch.mask_shape, np.int32)
        self._enabled = np.zeros(self._batch.mask_shape[:2], np.int32)
        self._grammars = [grammars[slot % len(grammars)] for slot in range(slots)]
        self._documents = [documents[slot % len(documents)] for slot in range(slots)]
        self._positions = [0] * slots
        for slot, document in enumerate(self._documents):
            self._begin(slot)
            self._batch.advance(slot, document[: slot * len(document) // slots])
            self._positions[slot] = slot * len(document) // slots

    def restart(self) -> None:
        """Puts new requests where documents are finished. Not part of a step."""
        for slot, document in enumerate(self._documents):
            if self._positions[slot] == len(document):
                self._batch.release(slot)
                self._begin(slot)

    def advance(self) -> None:
        """One token for every slot."""
        for slot, document in enumerate(self._documents):
            accepted = self._batch.advance(slot, [document[self._positions[slot]]])
            if accepted != 1:
                raise RuntimeError("a document does not follow its guide")
            self._positions[slot] += 1

    def fill(self) -> None:
        """The masks of the next step."""
        self._batch.fill(self._masks, self._enabled)

    def _begin(self, slot: int) -> None:
        self._batch.admit(slot, self._grammars[slot].matcher())
        self._positions[slot] = 0


@dataclass
class Steps:
    """Microseconds of each step."""

    advance_us: list[float] = field(default_factory=list)
    fill_us: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Medians, and what the slowest fills take."""
        return {
            "advance_us": float(np.median(self.advance_us)),
            "fill_us": float(np.median(self.fill_us)),
            "fill_us_mean": float(np.mean(self.fill_us)),
            "fill_us_p99": float(np.percentile(self.fill_us, 99)),
        }


def run_steps(
    writers: Sequence[Writers], steps: int, fill: Callable[[], None], into: Steps
) -> None:
    """Times steps; ``fill`` is the fills of all writers, however it makes them."""
    for _ in range(steps):
        for each in writers:
            each.restart()
        started = time.perf_counter()
        for each in writers:
            each.advance()
        advanced = time.perf_counter()
        fill()
        into.advance_us.append(1e6 * (advanced - started))
        into.fill_us.append(1e6 * (time.perf_counter() - advanced))


def measure(
    grammars: Sequence[Grammar], documents: Sequence[Sequence[int]], slots: int, rounds: int
) -> Summaries:
    """One thread and two, in turns, over ``rounds`` documents per slot after one to warm up."""
    whole = Writers(grammars, documents, slots)
    halves = [Writers(grammars, documents, n) for n in (slots // 2, slots - slots // 2)]
    steps = max(map(len, documents))
    one, two = Steps(), Steps()
    with ThreadPoolExecutor(1) as helper:

        def fill_halves() -> None:
            other = helper.submit(halves[1].fill)
            halves[0].fill()
            other.result()

        for repetition in range(-1, rounds):
            if repetition == 0:
                one, two = Steps(), Steps()
            run_steps([whole], steps, whole.fill, one)
            run_steps(halves, steps, fill_halves, two)
    return {"one thread": one.summary(), "two threads": two.summary()}


def run(loaded: LoadedModel, slots: int, rounds: int, folder: Path) -> Results:
    """Measures every task with every engine that serves it; prints, writes ``fill.json``."""
    info = TokenizerInfo.from_transformers(
        loaded.tokenizer, loaded.config.vocab_size, loaded.config.eos_token_ids
    )
    results: Results = {}
    with contextlib.closing(GrammarCompiler(info, isolation="none")) as compiler:
        for (name, task), engine in itertools.product(TASKS.items(), ENGINES):
            try:
                grammars = [compiler.compile(guide, engine) for guide in task.guides]
            except GuideError:
                continue  # the engine does not serve all of the task
            documents = [
                loaded.tokenizer.encode(text, add_special_tokens=False) for text in task.documents
            ]
            results.setdefault(name, {})[engine] = measure(grammars, documents, slots, rounds)
    _report(results, slots)
    write_json("fill", {"slots": slots, "vocab_size": info.vocab_size, "tasks": results}, folder)
    return results


def _report(results: Results, slots: int) -> None:
    print_table(
        f"a step of {slots} slots, µs",
        ["guide", "engine", "advance", "fill", "mean", "p99", "on two threads", "mean", "p99"],
        _rows(results),
    )
    typical = results.get("object", {}).get("llguidance")
    if typical is not None:
        one = typical["one thread"]
        print_verdict(
            f"llguidance, object, {slots} slots: advance + fill, ms",
            1e-3 * (one["advance_us"] + one["fill_us"]),
            most=TARGET_MS,
        )


def _rows(results: Results) -> Iterator[list[str]]:
    for name, by_engine in results.items():
        for engine, by_threads in by_engine.items():
            one, two = by_threads["one thread"], by_threads["two threads"]
            fills = ("fill_us", "fill_us_mean", "fill_us_p99")
            figures = [one["advance_us"], *(x[key] for x in (one, two) for key in fills)]
            yield [name, engine, *(f"{figure:.0f}" for figure in figures)]


def main(
    slots: Annotated[int, typer.Option(help="requests in the batch", min=2)] = 8,
    rounds: Annotated[int, typer.Option(help="timed documents per slot", min=1)] = 20,
    model: Annotated[
        str, typer.Option(help="whose vocabulary: name, folder, GGUF file or hub id")
    ] = ("smollm2-135m-instruct"),
    folder: Annotated[Path, typer.Option(help="where JSON goes")] = RESULTS,
) -> None:
    """Time the grammar side of decode steps, without a model."""
    warn_if_busy()
    try:
        loaded = load_model(model, dtype="float32")
    except UserError as error:
        raise typer.BadParameter(str(error)) from error
    run(loaded, slots, rounds, folder)


if __name__ == "__main__":
    typer.run(main)
