"""What the training examples share: a task that a small model learns in minutes, and a picture of it.

The task is extraction: "Ada Moreau, 34, works as a nurse in Lyon." becomes
``{"name": "Ada Moreau", "age": 34, "job": "nurse", "city": "Lyon"}``. Sentences are drawn at random;
the people that a model is evaluated with never occur in training.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import optax

from gkv_jax import Guide, Sampling
from gkv_jax.evaluate import Document, GuidedEvaluation

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,11} [A-Z][a-z]{1,11}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "job": {"type": "string", "pattern": "^[a-z]{2,12}$"},
        "city": {"type": "string", "pattern": "^[A-Z][a-z]{1,11}$"},
    },
    "required": ["name", "age", "job", "city"],
    "additionalProperties": False,
}
GUIDE = Guide.json_schema(SCHEMA, max_whitespace=0)
LENGTH = 72
"""Tokens of an example, at most."""
ANSWER = Sampling(max_tokens=96)
"""Long enough for every answer that the schema allows."""


def _words(text: str) -> list[str]:
    return text.split()


_SENTENCES = (
    "{name}, {age}, works as a {job} in {city}.",
    "{name} is {age} years old and lives in {city}, where people know the {job}.",
    "In {city} there is a {job} of {age} years: {name}.",
    "The {job} {name} moved to {city} at the age of {age}.",
    "At {age}, {name} became a {job} in {city}.",
    "Ask {name} from {city}, a {job}, now {age}.",
)
_FIRST = _words(
    "Ada Alan Amina Anton Boris Carla Chen Clara Daniel Diego Elena Emil Erik Fatima Felix Grace "
    "Hanna Hugo Ines Ivan Jonas Julia Karim Kenji Laura Lena Leo Linus Lucia Marco Maria Mila Nadia "
    "Nina Noah Olga Omar Oscar Paula Pedro Petra Rosa Ruth Samir Sara Sofia Tariq Theo Yara Zoe"
)
_LAST = _words(
    "Abbas Alves Baker Bauer Berg Bianchi Costa Cruz Dubois Egger Farah Ferrari Fischer Garcia Haas "
    "Hansen Hill Ito Jansen Kaya Keller Khan Kim Klein Kovac Lang Larsen Leroy Lopez Maier Martin "
    "Meyer Moreau Mori Nagy Novak Olsen Park Patel Peters Popov Ricci Rossi Sato Silva Singh Stone "
    "Tanaka Vogel Weber"
)
_JOBS = _words(
    "actor baker barber butcher carpenter chemist cook dentist doctor driver farmer gardener judge "
    "lawyer librarian mason mechanic miner nurse painter pilot plumber potter sailor singer tailor "
    "teacher translator waiter writer"
)
_CITIES = _words(
    "Accra Athens Berlin Bogota Boston Cairo Chicago Cork Dakar Delhi Dublin Geneva Ghent Hanoi "
    "Kyoto Lagos Lima Lisbon London Lyon Madrid Milan Nairobi Oslo Paris Porto Prague Quito Rome "
    "Seoul Split Tokyo Turin Utrecht Vienna Warsaw Zagreb Zurich"
)


def draw(rng: random.Random, *, seen: bool) -> tuple[str, dict[str, Any]]:
    """A sentence and what it says; of people for training if ``seen``, else of the others."""
    while True:
        first, last = rng.randrange(len(_FIRST)), rng.randrange(len(_LAST))
        if ((first + last) % 5 > 0) == seen:
            break
    record = {
        "name": f"{_FIRST[first]} {_LAST[last]}",
        "age": rng.randrange(18, 90),
        "job": rng.choice(_JOBS),
        "city": rng.choice(_CITIES),
    }
    return rng.choice(_SENTENCES).format(**record), record


def documents(count: int) -> list[Document]:
    """Sentences about people that do not occur in training, always the same ones."""
    rng = random.Random("evaluation")
    drawn = [draw(rng, seen=False) for _ in range(count)]
    return [Document(f"{text}\n", GUIDE, record) for text, record in drawn]


def make_tokenizer(folder: Path, vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of the task; trained once, then read from ``folder``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").exists():
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<end>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer = Tokenizer(models.BPE())
        # Blanks stand alone, so that a word is the same in a sentence and behind a quotation mark.
        words = Regex(r"\p{L}+|\d|\s+|[^\p{L}\d\s]+")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(words, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        rng = random.Random("tokenizer")
        corpus = (f"{text}\n{_answer(record)}" for text, record in _drawn(rng, 5000))
        tokenizer.train_from_iterator(corpus, trainer)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
        fast.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def batch(tokenizer: Any, step: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The examples of one step: tokens int32 ``[size,LENGTH+1]`` and which of them to learn, bool.

    Drawn from the step alone: a run that is resumed sees what it would have seen.
    """
    tokens = np.full((size, LENGTH + 1), tokenizer.eos_token_id, np.int32)
    learned = np.zeros((size, LENGTH + 1), bool)
    for row, (text, record) in enumerate(_drawn(random.Random(f"step {step}"), size)):
        prompt, answer = tokenizer([f"{text}\n", _answer(record)])["input_ids"]
        end = len(prompt) + len(answer) + 1  # with the token that ends it
        assert end <= LENGTH + 1, f"an example has {end} tokens; raise LENGTH"
        tokens[row, : end - 1] = prompt + answer
        learned[row, len(prompt) : end] = True
    return tokens, learned


def learning_rate() -> optax.Schedule:
    """Rises over the first steps, then stays: a run may be resumed with more steps."""
    return optax.linear_schedule(0.0, 2e-3, 50)


def _drawn(rng: random.Random, count: int) -> list[tuple[str, dict[str, Any]]]:
    return [draw(rng, seen=True) for _ in range(count)]


def _answer(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"))


class History:
    """The evaluations of a run: in ``history.json``, and as a picture in ``curves.png``."""

    def __init__(self, folder: Path, step: int) -> None:
        """Read what was found up to ``step``: what came later is found again."""
        self._file, self._picture = folder / "history.json", folder / "curves.png"
        entries = json.loads(self._file.read_text("utf-8")) if self._file.exists() else []
        self.entries = [entry for entry in entries if entry["step"] <= step]

    def __contains__(self, step: int) -> bool:
        return any(entry["step"] == step for entry in self.entries)

    def add(self, step: int, evaluation: GuidedEvaluation) -> None:
        """Print the evaluation of a step, keep its figures, and draw the picture anew."""
        print(f"step {step}: {evaluation}", flush=True)
        self.entries.append({"step": step, "scores": evaluation.to_dict()["scores"]})
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self.entries, indent=1) + "\n", "utf-8")
        new.replace(self._file)  # whole, even if the program is killed here
        self._draw()

    def _draw(self) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.4), dpi=150, layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, mode in zip(panels, ("guided", "free"), strict=True):
            scores = [each for e in self.entries for each in e["scores"] if each["mode"] == mode]
            for name, label, colour in _CURVES:
                shares = [100 * score[name] for score in scores]
                steps = [entry["step"] for entry in self.entries]
                axes.plot(steps, shares, color=colour, label=label, marker="o", markersize=3)
            axes.set(title=mode, xlabel="training step", ylim=(-3, 103))
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("% of the documents (of the fields)")
        panels[1].legend(loc="lower right")
        figure.savefig(self._picture)


_CURVES = (
    ("valid", "valid", "#009E73"),
    ("field_accuracy", "field accuracy", "#E69F00"),
    ("exact", "exact match", "#0072B2"),
)
