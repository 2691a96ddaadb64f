"""Guided evaluation: how often is the output valid, and how often right, guided and free?

    from gkv_jax.evaluate import Document, guided

    dataset = [Document(prompt, schema, {"name": "Ada Moreau", "age": 34}), ...]
    print(guided(engine, dataset, sampling=Sampling(max_tokens=96)))

It runs on the live weights of an engine, so a training loop can call it every few hundred steps, after
``engine.update_params``. Programs are compiled in the first round, before the clock runs; later rounds
compile none, unless a prompt is longer than any before.
"""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, get_args

from gkv_jax.engine import Engine
from gkv_jax.errors import UserError
from gkv_jax.evaluate.guided_result import Answer, DocumentError, GuidedEvaluation, Mode, Score
from gkv_jax.evaluate.judge import Judge, expected_value
from gkv_jax.prompts import Prompt
from gkv_jax.request import Result
from gkv_jax.sampling import Sampling
from grammar_host import Grammar, GrammarError, Guide


@dataclasses.dataclass(frozen=True)
class Document:
    """A prompt, and what a right answer to it is.

    Attributes:
      prompt: as for ``Engine.generate``: a text, chat messages or token ids.
      guide: the language of the answers: a ``Guide``, or a JSON Schema as ``Guide.json_schema`` takes
        it (a dict, a bool, a JSON text, or a class with ``model_json_schema``).
      expected: the right answer: a JSON value, or a text where the guide is not one of JSON.
    """

    prompt: Prompt
    guide: Any
    expected: Any


def guided(
    engine: Engine | Mapping[str, Engine],
    dataset: Sequence[Document | Mapping[str, Any]],
    *,
    sampling: Sampling | None = None,
    compare: Mode | Iterable[Mode] = ("guided", "free"),
) -> GuidedEvaluation:
    """Let a model answer every document, and judge the answers.

    Args:
      engine: whose weights, cache and slots are used; it is left as it was. Several, by name, to compare
        caches or models: each answers all documents in turn.
      dataset: the documents; a mapping stands for the ``Document`` with these fields.
      sampling: of all answers; ``Sampling()`` if None. An answer that ``max_tokens`` cuts is seldom
        valid, guided or not.
      compare: ``guided``: the grammar rules the output; ``free``: it does not, and only judges.

    Returns:
      Rates, throughput and every answer; see ``GuidedEvaluation``. A document that one of the engines
      cannot serve (an invalid schema, say, or a prompt that is too long) is listed in its ``errors``,
      and left out of every rate; the others are not disturbed. A request that fails on the way is
      listed there, too, and counts as not valid.

    Raises:
      UserError: no documents, none that can be evaluated, an unknown mode, or arguments of a wrong type.
      EngineClosedError: the engine is closed.
    """
    engines, documents, modes = _engines(engine), _documents(dataset), _modes(compare)
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise UserError(f"sampling is {sampling!r}; give a Sampling")
    errors: dict[int, DocumentError] = {}
    judges = {name: _judges(each, documents, sampling, errors) for name, each in engines.items()}
    usable = [index for index in range(len(documents)) if index not in errors]
    if not usable:
        first = errors[min(errors)]
        raise UserError(
            f"dataset: none of the {len(documents)} documents can be evaluated; "
            f"document {first.index}: {first.message}"
        )
    scores: list[Score] = []
    answers: list[Answer] = []
    for name, each in engines.items():
        own = [judges[name][index] for index in usable]
        # So that figures of a first round are those of later ones, which find everything compiled.
        each.warm_up(max(judge.prompt_tokens for judge in own))
        for mode in modes:
            began = time.perf_counter()
            results = each.generate(
                [documents[index].prompt for index in usable],
                guide=[judge.grammar.guide for judge in own] if mode == "guided" else None,
                sampling=sampling,
            )
            seconds = time.perf_counter() - began
            found = [
                _answer(name, mode, index, judge, result)
                for index, judge, result in zip(usable, own, results, strict=True)
            ]
            scores.append(_score(found, results, seconds, each.cache_bytes))
            answers += found
    failed = [
        DocumentError(each.index, each.error, each.engine, each.mode)
        for each in answers
        if each.error is not None
    ]
    refused = [errors[index] for index in sorted(errors)]
    return GuidedEvaluation(len(documents), tuple(scores), tuple(answers), (*refused, *failed))


def _judges(
    engine: Engine,
    documents: Sequence[Document],
    sampling: Sampling,
    errors: dict[int, DocumentError],
) -> dict[int, Judge]:
    """A judge for each document that the engine can serve; what the others lack goes to ``errors``."""
    compiling: dict[int, tuple[Any, Future[Grammar]]] = {}
    judges: dict[int, Judge] = {}

    def refuse(index: int, error: Exception) -> None:
        errors.setdefault(index, DocumentError(index, str(error)))

    # Many at once: the compiler has several workers, and a schema may take seconds.
    for index, document in enumerate(documents):
        try:
            guide = document.guide
            if not isinstance(guide, Guide):
                guide = Guide.json_schema(guide)
            expected = expected_value(guide, document.expected)
            compiling[index] = expected, engine.compiler.submit(guide)
        except (UserError, GrammarError) as error:
            refuse(index, error)
    for index, (expected, future) in compiling.items():
        try:
            grammar = future.result()
            request = engine.prepare(documents[index].prompt, grammar, sampling)
        except (UserError, GrammarError) as error:
            refuse(index, error)
        else:
            judges[index] = Judge(grammar, expected, engine.tokenizer, len(request.prompt))
    return judges


def _answer(engine: str, mode: Mode, index: int, judge: Judge, result: Result) -> Answer:
    verdict = judge.judge(result)
    return Answer(
        engine=engine,
        mode=mode,
        index=index,
        text=result.text,
        valid=verdict.valid,
        exact=verdict.exact,
        fields=verdict.fields,
        problem=verdict.problem,
        finish_reason=result.finish_reason,
        tokens=len(result.tokens),
        error=None if result.error is None else str(result.error) or repr(result.error),
    )


def _score(
    answers: Sequence[Answer], results: Sequence[Result], seconds: float, cache_bytes: int
) -> Score:
    """The answers of one engine in one mode, taken together."""
    count = len(answers)
    fields: dict[str, tuple[int, int]] = {}
    for answer in answers:
        for field, (right, leaves) in answer.fields.items():
            before = fields.get(field, (0, 0))
            fields[field] = before[0] + right, before[1] + leaves
    right, leaves = (sum(pair) for pair in zip(*fields.values(), strict=True))
    reasons = [answer.finish_reason for answer in answers]
    tokens = sum(answer.tokens for answer in answers)
    return Score(
        engine=answers[0].engine,
        mode=answers[0].mode,
        documents=count,
        valid=sum(answer.valid for answer in answers) / count,
        exact=sum(answer.exact for answer in answers) / count,
        field_accuracy=right / leaves,
        fields={field: part / whole for field, (part, whole) in fields.items()},
        finish_reasons={reason: reasons.count(reason) for reason in dict.fromkeys(reasons)},
        tokens=tokens,
        forwards=sum(result.stats["forwards"] for result in results),
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        cache_bytes=cache_bytes,
    )


def _engines(engine: Any) -> dict[str, Engine]:
    engines = dict(engine) if isinstance(engine, Mapping) else {"engine": engine}
    if not engines:
        raise UserError("engine holds no engines; give one, or several by name")
    for name, each in engines.items():
        if not isinstance(name, str) or not isinstance(each, Engine):
            raise UserError(f"engine is {each!r}; give an Engine, or several in a dict by name")
    return engines


def _documents(dataset: Any) -> list[Document]:
    if not isinstance(dataset, Sequence) or isinstance(dataset, str):
        raise UserError(f"dataset is {dataset!r}; give a list of documents")
    if not dataset:
        raise UserError("dataset is empty; give at least one document")
    names = [field.name for field in dataclasses.fields(Document)]
    documents = []
    for index, each in enumerate(dataset):
        if isinstance(each, Mapping):
            if sorted(map(str, each)) != sorted(names):
                raise UserError(
                    f"dataset: document {index} has the fields {', '.join(map(str, each))}; "
                    f"it needs {', '.join(names)}"
                )
            each = Document(**each)
        if not isinstance(each, Document):
            raise UserError(f"dataset: document {index} is {each!r}; give a Document, or a dict")
        documents.append(each)
    return documents


def _modes(compare: Any) -> list[Mode]:
    modes: list[Any] = [compare]
    if not isinstance(compare, str):
        modes = list(compare) if isinstance(compare, Iterable) else []
    for mode in modes:
        if mode not in get_args(Mode):
            raise UserError(
                f"compare: there is no {mode!r}; choose from {', '.join(get_args(Mode))}"
            )
    if not modes:
        raise UserError(f"compare is {compare!r}; name some of {', '.join(get_args(Mode))}")
    return list(dict.fromkeys(modes))
