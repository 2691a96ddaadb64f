"""Drafts on trained weights: the same tokens in fewer forward passes."""

from collections.abc import Iterator
from typing import Any

import pytest

from gkv_jax import CacheSpec, Engine, Guide, Sampling
from gkv_jax.weights.registry import LoadedModel

pytestmark = pytest.mark.model

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "occupation": {"enum": ["doctor", "documentalist", "baker"]},
        "years_of_experience": {"type": "integer", "minimum": 0, "maximum": 60},
    },
    "required": ["first_name", "occupation", "years_of_experience"],
    "additionalProperties": False,
}
ADA = "Ada, a doctor for 21 years, met Ben, a baker for 9 years. As JSON, the {}: "
STORY = "The cat sat on the mat. The dog sat on the log. The cat sat on the mat. The dog sat on the log. "
SAMPLED = {"temperature": 0.8, "seed": 5}
# The last prompt fills the window, so that tokens are evicted while it is continued.
WORK: list[tuple[str, Guide | None, dict[str, Any]]] = [
    (ADA.format("doctor"), Guide.json_schema(PERSON, max_whitespace=0), {}),
    (ADA.format("baker"), Guide.json_schema(PERSON), SAMPLED),
    ("Her phone number is ", Guide.regex(r"\+44 \(0\)20 \d{4} \d{4}, extension \d{2}"), {}),
    ("The date is ", Guide.regex(r"(Monday|Tuesday), \d{1,2} (March|May) 20\d\d"), SAMPLED),
    (STORY, None, {}),
    (STORY * 4, None, SAMPLED),
]


@pytest.fixture(scope="module")
def engine(smollm2: LoadedModel, smollm2_params: Any) -> Iterator[Engine]:
    with Engine(
        smollm2.model,
        smollm2_params,
        smollm2.tokenizer,
        cache=CacheSpec(sinks=4, window=124, max_drafts=4),
        slots=2,
        stop_token_ids=smollm2.config.eos_token_ids,
        verify="always",
    ) as engine:
        yield engine


def run(engine: Engine, ways: list[dict[str, Any]]) -> list[Any]:
    """``WORK``, each with its way of drafting."""
    return engine.generate(
        [prompt for prompt, _, _ in WORK],
        guide=[guide for _, guide, _ in WORK],
        sampling=[
            Sampling(max_tokens=48, **options, **way)
            for (_, _, options), way in zip(WORK, ways, strict=True)
        ],
    )


def outcome(results: list[Any]) -> list[Any]:
    return [(r.tokens, r.text, r.finish_reason, r.error) for r in results]


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[Any]:
    results = run(engine, [{"jump": "off"}] * len(WORK))
    assert all(r.error is None for r in results)
    assert all(r.stats["drafts_proposed"] == 0 for r in results)
    return results


def edited(text: str) -> str:
    """The text with a word more after a third of it, and a letter less after two thirds."""
    first, second = len(text) // 3, 2 * len(text) // 3
    return text[:first] + " indeed" + text[first:second] + text[second + 1 :]


def forwards(results: list[Any]) -> list[int]:
    return [r.stats["forwards"] for r in results]


def test_what_the_grammar_forces_and_the_text_repeats(engine: Engine, plain: list[Any]) -> None:
    results = run(engine, [{"lookup": True}] * len(WORK))
    assert outcome(results) == outcome(plain)
    before, now = forwards(plain), forwards(results)
    assert all(n <= b for n, b in zip(now, before, strict=True))
    for guided in (0, 1, 2):
        assert results[guided].stats["drafts"]["forced"]["accepted"] > 0
        assert now[guided] < before[guided]
    assert results[4].stats["drafts"]["lookup"]["accepted"] > 0
    assert sum(now) < 0.8 * sum(before)


def test_a_prediction_with_two_edits(engine: Engine, plain: list[Any]) -> None:
    ways = [{"jump": "off", "prediction": edited(result.text)} for result in plain]
    results = run(engine, ways)
    assert outcome(results) == outcome(plain)
    before, now = forwards(plain), forwards(results)
    assert all(n < b for n, b in zip(now, before, strict=True))
    assert sum(now) < 0.6 * sum(before)


def test_each_row_in_its_own_way(engine: Engine, plain: list[Any]) -> None:
    ways = [
        {"jump": "off"},
        {"lookup": True},
        {"prediction": edited(plain[2].text)},
        {"jump": "off", "lookup": True},
        {"jump": "off", "lookup": True, "prediction": edited(plain[4].text)},
        {},
    ]
    results = run(engine, ways)
    assert outcome(results) == outcome(plain)
    assert sum(forwards(results)) < sum(forwards(plain))
    assert results[0].stats["drafts_proposed"] == results[5].stats["drafts_proposed"] == 0
