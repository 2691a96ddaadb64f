"""What the clients ask: chats of all lengths, half of them for a document of one of eight schemas."""

import dataclasses
import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema

PROMPT_WORDS = 10, 500
"""Shortest and longest; with the chat template some 20 to 750 tokens."""
MAX_TOKENS = 16, 128

_WORDS = re.findall(
    r"\w+",
    """
the river town old bridge people walk every morning market bread fish boat water small house light
long road north hill wind rain summer garden tree apple child school book story king winter stone
and of in to a with from over under near after before many few some that which where when
""",
)


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(length: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": length}


def _whole(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _list(item: Any, most: int) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1, "maxItems": most}


# Each is short enough for the fewest tokens that a guided request may write.
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "person": _object(name=_text(12), age=_whole(0, 120)),
    "place": _object(city=_text(12), coast={"type": "boolean"}),
    "point": _object(x=_whole(-99, 99), y=_whole(-99, 99), z=_whole(-99, 99)),
    "colours": _list({"enum": ["red", "green", "blue", "black", "white"]}, 4),
    "answer": _object(yes={"type": "boolean"}, why=_text(16)),
    "scores": _list(_whole(0, 10), 6),
    "date": _object(day={"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"}),
    "order": _object(items=_list(_object(id=_whole(1, 99), count=_whole(1, 9)), 2)),
}
GUIDED_TOKENS = 96, MAX_TOKENS[1]
"""A guided answer may be longer than its document needs; blanks may still use them up."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One request.

    Attributes:
      schema: its name in ``SCHEMAS``; None for free text.
    """

    prompt: str
    max_tokens: int
    seed: int
    stream: bool
    schema: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}]

    def is_valid(self, text: str) -> bool:
        """Whether a finished answer is a document of the schema."""
        assert self.schema is not None
        try:
            jsonschema.validate(json.loads(text), SCHEMAS[self.schema])
        except (ValueError, jsonschema.ValidationError):
            return False
        return True


def tasks(count: int, seed: int = 0) -> Sequence[Task]:
    """So many requests, the same for the same seed: each second one guided, and streamed in turns."""
    rng, names = random.Random(seed), list(SCHEMAS)
    made = []
    for index in range(count):
        schema = names[index // 2 % len(names)] if index % 2 else None
        # As many short prompts as long ones, whatever the order of magnitude.
        low, high = PROMPT_WORDS
        words = rng.choices(_WORDS, k=round(low * (high / low) ** rng.random()))
        ask = "Continue this story" if schema is None else f"Answer with a JSON document ({schema})"
        made.append(
            Task(
                f"{ask}: {' '.join(words)}",
                rng.randint(*(MAX_TOKENS if schema is None else GUIDED_TOKENS)),
                seed=index,
                stream=index // 2 % 2 == 0,
                schema=schema,
            )
        )
    return made
