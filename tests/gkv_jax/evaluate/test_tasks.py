"""Prompts say the answer once, where they should, and fit their length."""

import re

import pytest

from gkv_jax import UserError
from gkv_jax.evaluate import tasks
from tests.gkv_jax.tiny import byte_tokenizer

PROSE = " ".join(f"This is sentence number {i} of a long and rather dull text." for i in range(90))
LENGTH = 700  # bytes are the tokens
LONGEST_UNIT = 70
TOKENIZER = byte_tokenizer()


def sample(task: str, depth: float = 0.5, seed: int = 0, length: int = LENGTH) -> tasks.Sample:
    return tasks.build(task, TOKENIZER, length, depth, seed, PROSE)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_prompts_fill_their_length(task: str) -> None:
    for length in (500, 700, 1100):
        assert length - LONGEST_UNIT <= len(sample(task, length=length).prompt) <= length


@pytest.mark.parametrize("task", tasks.TASKS)
def test_prompts_are_drawn_from_their_seed(task: str) -> None:
    assert sample(task, seed=3) == sample(task, seed=3)
    assert sample(task, seed=3).answers != sample(task, seed=4).answers
    assert sample(task, depth=0.2).answers == sample(task, depth=0.8).answers


@pytest.mark.parametrize("task", ["needle", "needle-prose", "lookup"])
def test_the_answer_stands_once_at_its_depth(task: str) -> None:
    for depth in (0.0, 0.25, 0.9, 1.0):
        each = sample(task, depth)
        text = TOKENIZER.decode(each.prompt)
        (answer,) = each.answers
        assert text.count(answer) == 1
        # Nothing but the haystack stands between the blank lines.
        haystack = text.split("\n\n")[1]
        assert haystack.index(answer) / len(haystack) == pytest.approx(depth, abs=0.17)
        assert text.endswith(("is", '": "'))  # the reply has begun


def test_a_needle_may_stand_first_and_last() -> None:
    for depth, place in ((0.0, 0), (1.0, -1)):
        haystack = TOKENIZER.decode(sample("lookup", depth).prompt).split("\n\n")[1]
        assert sample("lookup", depth).answers[0] in haystack.splitlines()[place]


def test_keys_of_a_list_differ() -> None:
    haystack = TOKENIZER.decode(sample("lookup", length=9000).prompt).split("\n\n")[1]
    keys = re.findall(r'^"(.*?)"', haystack, re.MULTILINE)
    assert len(keys) == len(set(keys)) > 200


def test_variables_are_a_chain() -> None:
    each = sample("variables", 0.1)
    text = TOKENIZER.decode(each.prompt)
    first, second, third = each.answers
    places = [
        text.index(part)
        for part in (
            f"VAR {first} = ",
            f"VAR {second} = VAR {first}",
            f"VAR {third} = VAR {second}",
        )
    ]
    assert places == sorted(places)


def test_prose_is_consecutive() -> None:
    text = TOKENIZER.decode(sample("needle-prose").prompt)
    numbers = [int(n) for n in re.findall(r"sentence number (\d+)", text)]
    assert len(numbers) > 3
    assert numbers == [(numbers[0] + i) % 90 for i in range(len(numbers))]


def test_a_summary_asks_for_no_answer() -> None:
    each = tasks.summary(TOKENIZER, 400, 0, PROSE)
    assert each.answers == ()
    assert 300 < len(each.prompt) <= 400
    assert tasks.summary(TOKENIZER, 400, 1, PROSE) != each


def test_a_model_without_chat_template_gets_text() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    each = tasks.build("needle", tokenizer, LENGTH, 0.5, 0)
    assert "<user>" not in tokenizer.decode(each.prompt)
    assert "<user>" in TOKENIZER.decode(sample("needle").prompt)


@pytest.mark.parametrize(
    ("answers", "text", "expected"),
    [
        (["12345"], " 12345.", 1.0),
        (["12345"], "it is 123456", 0.0),
        (["12345"], "it is 912345", 0.0),
        (["12345"], "", 0.0),
        (["BCD", "XYZ"], "bcd, and then", 0.5),
        (["BCD", "XYZ"], "XYZ BCD", 1.0),
    ],
)
def test_scores(answers: list[str], text: str, expected: float) -> None:
    assert tasks.score(answers, text) == expected


def test_refused() -> None:
    with pytest.raises(UserError, match=r"lengths: 60 tokens do not hold .* use at least \d{3}"):
        sample("needle", length=60)
    with pytest.raises(UserError, match=r"depths: 1.5"):
        sample("needle", depth=1.5)
    with pytest.raises(UserError, match="choose from needle, needle-prose, lookup"):
        sample("haystack")
    with pytest.raises(UserError, match="no sentences"):
        tasks.build("needle-prose", TOKENIZER, LENGTH, 0.5, 0, "Short.")


def test_the_least_length_that_is_named_works() -> None:
    with pytest.raises(UserError) as raised:
        sample("needle", length=60)
    least = int(re.findall(r"at least (\d+)", str(raised.value))[0])
    sample("needle", length=least)
    with pytest.raises(UserError):
        sample("needle", length=least - 1)
