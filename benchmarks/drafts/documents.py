"""The documents that are asked for: problems of MaskBench as chat prompts, and what was answered."""

import abc
import copy
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from benchmarks.maskbench.problems import Problem
from gkv_jax import Engine, GrammarError, Guide
from grammar_host.schema.walk import children

MOST_PROMPT_TOKENS = 400
"""Longer schemas are left out."""

_WORDING = (
    "Write a JSON document that obeys the JSON Schema below. "
    "Answer with the document and nothing else.\n\n{schema}"
)


@dataclasses.dataclass(frozen=True)
class Document:
    """What is asked for.

    Attributes:
      name: of the problem.
      schema: what the document must obey, closed; see ``closed``.
      messages: the chat that asks for it.
      prompt: the tokens of the chat, which all ways read.
    """

    name: str
    schema: dict[str, Any]
    messages: tuple[dict[str, str], ...]
    prompt: tuple[int, ...]

    @property
    def guide(self) -> Guide:
        return guide_of(self.schema)


@dataclasses.dataclass(frozen=True)
class Answer:
    """One document by one way, ready for JSON.

    Attributes:
      text: the document.
      tokens: its ids, without the stop token.
      finished: whether it ended by itself, not by the limit of tokens.
      forwards: passes of the model from which tokens were taken, the stop token's included.
      first_tokens: tokens that came at once at the beginning, after ``first_seconds``.
      first_seconds: until these came, so that reading the prompt is in it.
      seconds: until the end. Both begin when the document has a slot: no waiting for others is in them.
      spent: seconds that it accounts for: from the request to the end of one that was asked for alone,
        an equal part of the time of those that were asked for at once.
      drafts: ``{source: {"proposed", "accepted"}}``.
      error: why there is no document: the schema is refused, say.
    """

    text: str = ""
    tokens: Sequence[int] = ()
    finished: bool = False
    forwards: int = 0
    first_tokens: int = 1
    first_seconds: float = 0.0
    seconds: float = 0.0
    spent: float = 0.0
    drafts: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    error: str | None = None


class Way(abc.ABC):
    """An engine and how it is asked."""

    @abc.abstractmethod
    def answer(self, documents: Sequence[Document], max_tokens: int) -> list[Answer]:
        """One answer for each document; all are asked for at once."""

    def warm_up(self, documents: Sequence[Document], max_tokens: int) -> None:
        """Be ready for such documents: no answer shall wait for a compiler."""
        self.answer(documents[:1], max_tokens)


Answers = dict[str, Answer]
"""By document."""


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy whose objects have no properties but those that are mentioned.

    As XGrammar and llama.cpp do by default: objects with ``properties`` that do not say
    ``additionalProperties``. Where a schema is open, a small model likes to write the schema itself as
    further properties, until the tokens are used up.
    """
    result = copy.deepcopy(schema)
    queue: list[Any] = [result]
    while queue:
        each = queue.pop()
        if isinstance(each, dict):
            if isinstance(each.get("properties"), dict):
                each.setdefault("additionalProperties", False)
            queue.extend(child for _, child in children(each))
    return result


def guide_of(schema: dict[str, Any]) -> Guide:
    """Compact documents of a closed schema."""
    return Guide.json_schema(schema, max_whitespace=0)


def choose(problems: Sequence[Problem], engine: Engine, count: int) -> list[Document]:
    """The first ``count`` problems that suit: their documents are objects, prompts are short.

    Problems whose closed schema ``engine`` refuses do not suit.
    """
    chosen: list[Document] = []
    for problem in problems:
        if len(chosen) == count:
            break
        if not isinstance(problem.schema, dict) or problem.schema.get("type") != "object":
            continue
        schema = closed(problem.schema)
        compact = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        messages = ({"role": "user", "content": _WORDING.format(schema=compact)},)
        prompt = engine.prepare(messages).prompt
        document = Document(problem.name, schema, messages, prompt)
        if len(prompt) <= MOST_PROMPT_TOKENS and _compiles(document, engine):
            chosen.append(document)
    return chosen


def _compiles(document: Document, engine: Engine) -> bool:
    try:
        engine.compiler.compile(document.guide)
    except GrammarError:
        return False
    return True
