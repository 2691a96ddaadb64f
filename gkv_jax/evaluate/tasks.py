"""Retrieval tasks: something is said once in a long prompt and asked for at its end.

After RULER (arXiv 2404.06654): a sentence in a haystack of noise or of prose, a line of a long list of
keys and values, and a chain of variables that are assigned to each other. Everything is drawn from a
seed, and the prompt fits a number of tokens as closely as whole sentences allow.
"""

import bisect
import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from gkv_jax.errors import UserError

_NOISE = (
    "The grass is green.", "The sky is blue.", "The sun is yellow.",
    "Here we go.", "There and back again.",
)  # fmt: skip
_ADJECTIVES = (
    "amber", "brave", "calm", "dusty", "early", "frozen", "gentle", "hollow", "ivory", "jolly",
    "lucky", "misty", "narrow", "quiet", "rapid", "silver",
)  # fmt: skip
_NOUNS = (
    "anchor", "bridge", "candle", "desert", "engine", "falcon", "garden", "harbor", "island",
    "kettle", "lantern", "meadow", "orchard", "pencil", "river", "tunnel",
)  # fmt: skip
_ASKED_LATER = "you will be asked for it later."


@dataclasses.dataclass(frozen=True)
class Sample:
    """A prompt as tokens, and the texts that a right answer holds."""

    prompt: tuple[int, ...]
    answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Question:
    """What a task draws: the parts of a prompt whose haystack can have any size.

    Attributes:
      intro: what stands before the haystack.
      filler: ``filler(n)`` gives n sentences or lines of haystack; a prefix of ``filler(n + 1)``.
      needles: the sentences to find.
      joint: what stands between sentences.
      ask: what stands after the haystack.
      reply: how the answer begins; what the model writes after it is scored.
      answers: what the answer must hold.
    """

    intro: str
    filler: Callable[[int], list[str]]
    needles: tuple[str, ...]
    joint: str
    ask: str
    reply: str
    answers: tuple[str, ...]

    def text(self, size: int, depth: float) -> str:
        """The prompt with ``size`` units of filler, the first needle at ``depth`` of it.

        Further needles are spread evenly over what comes after the first.
        """
        units = self.filler(size)
        count = len(self.needles)
        for index in reversed(range(count)):  # from the end, so that earlier places stay right
            place = depth + (1 - depth) * index / count
            units.insert(round(place * size), self.needles[index])
        return f"{self.intro}\n\n{self.joint.join(units)}\n\n{self.ask}"


@dataclasses.dataclass(frozen=True)
class Task:
    """A kind of question.

    Attributes:
      draw: a question from a random generator and prose (which only some tasks use).
      new_tokens: tokens that an answer may take.
    """

    draw: Callable[[random.Random, str], Question]
    new_tokens: int


def task_named(name: str) -> Task:
    """One of ``TASKS``.

    Raises:
      UserError: there is no such task; the message lists them.
    """
    if name not in TASKS:
        raise UserError(f"tasks: there is no {name!r}; choose from {', '.join(TASKS)}")
    return TASKS[name]


def build(
    name: str, tokenizer: Any, length: int, depth: float, seed: int, prose: str = ""
) -> Sample:
    """One sample of a task.

    Args:
      name: one of ``TASKS``.
      tokenizer: a transformers tokenizer; its chat template is used if it has one.
      length: most tokens of the prompt; it is filled as far as whole sentences go.
      depth: where the answer lies in the haystack, 0 (first) to 1 (last, next to the question).
      seed: everything else is drawn from it.
      prose: the haystack of ``needle-prose``; sentences are taken from it.

    Raises:
      UserError: the question alone is longer than ``length``, or ``depth`` is outside of 0..1.
    """
    if not 0 <= depth <= 1:
        raise UserError(f"depths: {depth} is outside of 0..1")
    question = task_named(name).draw(random.Random(f"{name} {seed}"), prose)
    return _fit(question, tokenizer, length, depth, f"of task {name!r}")


def summary(tokenizer: Any, length: int, seed: int, prose: str) -> Sample:
    """A prompt of at most ``length`` tokens that asks for a summary of some of ``prose``.

    Raises:
      UserError: the question alone is longer than ``length``, or there is no sentence in ``prose``.
    """
    question = Question(
        intro="Read the following text.",
        filler=_prose(random.Random(f"summary {seed}"), prose),
        needles=(),
        joint=" ",
        ask="Summarize the text above.",
        reply="",
        answers=(),
    )
    return _fit(question, tokenizer, length, 0.0, "for a summary")


def _fit(question: Question, tokenizer: Any, length: int, depth: float, what: str) -> Sample:
    """The question with as much haystack as ``length`` tokens hold."""

    def tokens(size: int) -> list[int]:
        text = question.text(size, depth)
        return encode_prompt(tokenizer, text, question.reply)

    # A haystack that is too long, then the smallest one, less one.
    most = 8
    while len(tokens(most)) <= length:
        most *= 2
    size = bisect.bisect_right(range(most), length, key=lambda size: len(tokens(size))) - 1
    least = max(1, len(question.needles))
    if size < least:
        raise UserError(
            f"lengths: {length} tokens do not hold a question {what}; "
            f"use at least {len(tokens(least))}"
        )
    return Sample(tuple(tokens(size)), question.answers)


def encode_prompt(tokenizer: Any, text: str, reply: str) -> list[int]:
    """Tokens of a user's message and the beginning of the reply to it."""
    if tokenizer.chat_template:
        head = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},
        )
    else:
        head = tokenizer.encode(f"{text}\n", verbose=False)
    return [*head, *tokenizer.encode(reply, add_special_tokens=False)]


def score(answers: Sequence[str], text: str) -> float:
    """Share of the answers that ``text`` holds as whole words, whatever their case."""
    found = [
        re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) for answer in answers
    ]
    return sum(map(bool, found)) / len(answers)


def sentences(prose: str) -> list[str]:
    """Sentences of 40 to 400 characters, in order.

    Raises:
      UserError: there are none.
    """
    found = [each.strip() for each in re.split(r"(?<=[.!?])\s+", prose)]
    found = [each for each in found if 40 <= len(each) <= 400]
    if not found:
        raise UserError("text has no sentences of 40 to 400 characters; give a longer one")
    return found


def _secret(rng: random.Random) -> tuple[str, str]:
    return f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}", str(rng.randrange(10_000, 100_000))


def _noise(size: int) -> list[str]:
    return list(itertools.islice(itertools.cycle(_NOISE), size))


def _prose(rng: random.Random, prose: str) -> Callable[[int], list[str]]:
    """Consecutive sentences from a random one on, the first after the last."""
    found = sentences(prose)
    start = rng.randrange(len(found))
    return lambda size: [found[(start + i) % len(found)] for i in range(size)]


def _needle(rng: random.Random, filler: Callable[[int], list[str]]) -> Question:
    key, value = _secret(rng)
    return Question(
        intro=f"A secret number is hidden in the following text. Remember it: {_ASKED_LATER}",
        filler=filler,
        needles=(f"The secret number of the {key} is {value}.",),
        joint=" ",
        ask=f"What is the secret number of the {key} in the text above?",
        reply=f"The secret number of the {key} is",
        answers=(value,),
    )


def _needle_in_noise(rng: random.Random, prose: str) -> Question:
    return _needle(rng, _noise)


def _needle_in_prose(rng: random.Random, prose: str) -> Question:
    return _needle(rng, _prose(rng, prose))


def _lookup(rng: random.Random, prose: str) -> Question:
    names = [" ".join(each) for each in itertools.product(_ADJECTIVES, _ADJECTIVES, _NOUNS)]
    rng.shuffle(names)
    numbers = rng.sample(range(10_000, 100_000), len(names))
    key, value = names.pop(), str(numbers.pop())

    def lines(size: int) -> list[str]:
        # Of more lines than there are names, which no model reads, the first are repeated.
        pairs = itertools.cycle(zip(names, numbers, strict=True))
        return [f'"{name}": "{number}",' for name, number in itertools.islice(pairs, size)]

    return Question(
        intro=f"Here is a list of keys and values. Remember it: {_ASKED_LATER}",
        filler=lines,
        needles=(f'"{key}": "{value}",',),
        joint="\n",
        ask=f'What is the value of the key "{key}" in the list above?',
        reply=f'"{key}": "',
        answers=(value,),
    )


def _variables(rng: random.Random, prose: str) -> Question:
    names: list[str] = []
    while len(names) < 3:
        name = "".join(rng.choice("BCDFGHJKLMNPQRSTVWXZ") for _ in range(3))
        if name not in names:
            names.append(name)
    value = str(rng.randrange(10_000, 100_000))
    chain = [f"VAR {names[0]} = {value}."]
    chain += [f"VAR {new} = VAR {old}." for old, new in itertools.pairwise(names)]
    return Question(
        intro="Variables are assigned in the following text. Remember them.",
        filler=_noise,
        needles=tuple(chain),
        joint=" ",
        ask=f"Which variables have the value {value} in the text above? There are {len(names)}.",
        reply=f"The variables with the value {value} are: VAR",
        answers=tuple(names),
    )


TASKS: dict[str, Task] = {
    "needle": Task(_needle_in_noise, new_tokens=8),
    "needle-prose": Task(_needle_in_prose, new_tokens=8),
    "lookup": Task(_lookup, new_tokens=8),
    "variables": Task(_variables, new_tokens=24),
}
