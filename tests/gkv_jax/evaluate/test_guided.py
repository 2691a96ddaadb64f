"""Every measure by hand, bad documents beside good ones, and nothing compiled or kept by later rounds."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from gkv_jax import Engine, Guide, Result, Sampling, UserError
from gkv_jax.evaluate import Document, GuidedEvaluation, guided
from gkv_jax.evaluate.judge import Judge, Verdict, equal, expected_value, leaves, parse
from tests.gkv_jax.engines import PARAMS, TOKENIZER

PERSON = {
    "type": "object",
    "properties": {
        "name": {"const": "Ada"},
        "age": {"const": 34},
        "tags": {"type": "array", "prefixItems": [{"const": "x"}, {"const": "y"}], "minItems": 2,
                 "items": False},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}  # fmt: skip
"""A schema with a single answer, so that a random model gives it."""
COMPACT = Guide.json_schema(PERSON, max_whitespace=0)
ANSWER = {"name": "Ada", "age": 34, "tags": ["x", "y"]}
SAMPLING = Sampling(max_tokens=60)


@pytest.fixture(scope="module")
def engine(engines: Callable[[str], Engine]) -> Engine:
    return engines("device")


@pytest.fixture(scope="module")
def evaluation(engine: Engine) -> GuidedEvaluation:
    """Two good documents, with a right and a partly right expectation, and three bad ones."""
    half = {"name": "Ada", "age": 35, "tags": ["x", "z", "q"], "more": None}
    dataset = [
        Document("one", COMPACT, ANSWER),
        Document("two", {"type": "strin"}, {}),
        {"prompt": "three", "guide": COMPACT, "expected": half},
        Document("four", Guide.choice(["yes", "no"]), 1),
        Document("", COMPACT, ANSWER),
    ]
    return guided(engine, dataset, sampling=SAMPLING)


def test_the_measures_of_known_answers(evaluation: GuidedEvaluation) -> None:
    score = evaluation.score("guided")
    assert (score.documents, score.valid, score.exact) == (2, 1.0, 0.5)
    # 4 of 4 leaves, and 2 of 6: name and the first tag; "more" and the third tag are missing.
    assert score.field_accuracy == 6 / 10
    assert score.fields == {"/name": 1.0, "/age": 0.5, "/tags/*": 3 / 5, "/more": 0.0}
    assert score.finish_reasons == {"stop": 2}
    assert score.tokens == 2 * len(json.dumps(ANSWER, separators=(",", ":")))
    assert score.tokens_per_second == score.tokens / score.seconds
    assert 0 < score.forwards <= score.tokens + 2
    assert [answer.text for answer in evaluation.answers[:2]] == [
        '{"name":"Ada","age":34,"tags":["x","y"]}'
    ] * 2


def test_a_random_model_that_is_free_writes_no_json(evaluation: GuidedEvaluation) -> None:
    score = evaluation.score("free")
    assert (score.valid, score.exact, score.field_accuracy) == (0, 0, 0)
    assert score.tokens == 2 * SAMPLING.max_tokens
    assert all("does not parse" in str(a.problem) for a in evaluation.answers if a.mode == "free")


def test_bad_documents_are_reported_and_left_out(evaluation: GuidedEvaluation) -> None:
    assert evaluation.documents == 5
    assert [error.index for error in evaluation.errors] == [1, 3, 4]
    messages = [str(error) for error in evaluation.errors]
    assert messages[0].startswith("document 1: schema: at /type: ")
    assert messages[1] == "document 3: expected is 1; under a guide of choice give a text"
    assert messages[2].startswith("document 4: prompt is empty")
    assert [answer.index for answer in evaluation.answers] == [0, 2, 0, 2]


def test_later_rounds_compile_nothing_and_leave_nothing(
    engine: Engine, evaluation: GuidedEvaluation, compiles: list[str]
) -> None:
    dataset = [Document("one", COMPACT, ANSWER), Document("seven", COMPACT, ANSWER)]
    compiles.clear()
    engine.update_params(jax.tree.map(lambda leaf: leaf * 1.5, PARAMS))
    compiles.clear()  # of the multiplication
    try:
        first = guided(engine, dataset, sampling=SAMPLING)
        again = guided(engine, dataset, sampling=SAMPLING)
    finally:
        engine.update_params(PARAMS)
    assert compiles == []
    assert first.answers == again.answers
    assert first.answers[-2:] != evaluation.answers[-2:]  # by the new weights
    assert (engine.active, engine.queued) == (0, 0)


def test_other_guides_are_judged_by_their_engine(engine: Engine) -> None:
    dataset = [
        Document("a", Guide.regex("ab[0-9]{2}"), "ab00"),
        Document("a", Guide.choice(["yes"]), "yes"),
        Document("a", Guide.json(), {}),
    ]
    score = guided(engine, dataset[:2], sampling=SAMPLING, compare="guided").score("guided")
    assert (score.valid, score.fields) == (1.0, {"": score.exact})
    assert score.exact >= 0.5
    cut = guided(engine, dataset, sampling=Sampling(max_tokens=2), compare=["guided"])
    assert [answer.valid for answer in cut.answers] == [False] * 3  # "yes" has three tokens
    assert cut.scores[0].finish_reasons == {"length": 3}


def test_several_engines_answer_the_same_documents(engine: Engine) -> None:
    dataset = [Document("a", COMPACT, ANSWER)]
    both = guided({"one": engine, "other": engine}, dataset, sampling=SAMPLING, compare=["guided"])
    assert [(score.engine, score.valid) for score in both.scores] == [("one", 1), ("other", 1)]
    assert both.score("guided", "other").cache_bytes == engine.cache_bytes
    assert "one guided" in str(both)
    with pytest.raises(UserError, match="one guided, other guided; name one"):
        both.score("guided")


def test_a_request_that_fails_counts_as_invalid(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = engine.generate

    def failing(*args: Any, **named: Any) -> list[Result]:
        first, *rest = generate(*args, **named)
        return [dataclasses.replace(first, finish_reason="error", error=OSError("lost")), *rest]

    monkeypatch.setattr(engine, "generate", failing)
    found = guided(
        engine, [Document("a", COMPACT, ANSWER)] * 2, sampling=SAMPLING, compare="guided"
    )
    assert found.score("guided").valid == 0.5
    assert [str(error) for error in found.errors] == ["document 0 (engine, guided): lost"]
    assert found.answers[0].problem == "it ended in an error: lost"


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ([], {}, "dataset is empty"),
        ("text", {}, "dataset is 'text'; give a list"),
        (None, {}, "dataset is None; give a list"),
        ([1], {}, "document 0 is 1; give a Document, or a dict"),
        ([{"prompt": "a"}], {}, "document 0 has the fields prompt; it needs prompt, guide, expected"),
        ([Document("a", 5, 1)], {}, "none of the 1 documents can be evaluated; document 0: schema"),
        ([Document("a", True, {1})], {}, "expected is no JSON value"),
        ([Document("a", True, 1)], {"compare": ["best"]}, "compare: there is no 'best'; choose from"),
        ([Document("a", True, 1)], {"compare": []}, "compare is .*; name some of guided, free"),
        ([Document("a", True, 1)], {"compare": 3}, "compare is 3; name some of"),
        ([Document("a", True, 1)], {"sampling": 0.5}, "sampling is 0.5; give a Sampling"),
    ],
)  # fmt: skip
def test_bad_input_names_the_way_out(
    engine: Engine, dataset: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        guided(engine, dataset, **options)


@pytest.mark.parametrize("engine", [{}, None, {"a": 1}, {1: 2}])
def test_what_is_no_engine_is_refused(engine: Any) -> None:
    with pytest.raises(UserError, match=r"engine .*; give"):
        guided(engine, [Document("a", True, 1)])


def test_the_table_can_be_read(evaluation: GuidedEvaluation) -> None:
    first, head, ruled, free, *errors = str(evaluation).splitlines()
    assert first == "2 of 5 documents"
    columns = ["valid", "exact", "fields", "/name", "/age", "/tags/*", "/more", "tokens"]
    assert head.split() == [*columns, "tok/s", "cache", "ended", "by"]
    assert ruled.replace(" %", "").split()[:6] == [
        "guided",
        "100.0",
        "50.0",
        "60.0",
        "100.0",
        "50.0",
    ]
    assert ruled.endswith("stop 2")
    assert free.endswith("length 2")
    assert len(errors) == 3


def test_results_are_written_and_drawn(evaluation: GuidedEvaluation, tmp_path: Path) -> None:
    written = evaluation.to_json(tmp_path / "new" / "guided.json")
    assert json.loads(written.read_text("utf-8")) == evaluation.to_dict()
    assert evaluation.to_dict()["scores"][0]["fields"]["/tags/*"] == 0.6
    figure = evaluation.plot(tmp_path / "new" / "guided.png")
    assert (tmp_path / "new" / "guided.png").stat().st_size > 1000
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == [100, 0, 50, 0, pytest.approx(60), 0]


def test_drawing_takes_axes_and_refuses_the_rest(evaluation: GuidedEvaluation) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert evaluation.plot(right) is figure
    assert (len(left.patches), len(right.patches)) == (0, 6)
    assert evaluation.plot().axes
    with pytest.raises(UserError, match="its suffix must be one of"):
        evaluation.plot("guided.txt")
    with pytest.raises(UserError, match="target is 3; give a path, matplotlib axes or None"):
        evaluation.plot(3)


def verdict(engine: Engine, guide: Guide, text: str, expected: Any) -> Verdict:
    tokens = tuple(TOKENIZER.encode(text))
    result = Result(text, tokens, "stop", None, None, None, {})
    return Judge(engine.compiler.compile(guide), expected, TOKENIZER, 1).judge(result)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"name": "Ada", "age": 34.0, "tags": ["x", "y"]} ', None),
        ('{"tags": ["x", "y"], "age": 34, "name": "Ada"}', None),
        ('{"name": "Ada", "age": 35, "tags": ["x", "y"]}', "at /age: 34 was expected"),
        ('{"name": "Ada"}', 'at the root: "age" is a required property'),
        ('Sure: {"name": "Ada"}', "it does not parse: Expecting value"),
        ('{"age": NaN}', "it does not parse: NaN is no JSON"),
        ('{"age": 1e999}', "it does not parse: 1e999 is too large for a float"),
        ('{"name": "\\ud800", "age": 34, "tags": ["x", "y"]}', "it cannot be validated"),
        ("[" * 100_000, "it does not parse: it is nested too deeply"),
    ],
)
def test_json_is_judged_by_a_validator(engine: Engine, text: str, problem: str | None) -> None:
    found = verdict(engine, COMPACT, text, ANSWER)
    assert found.valid == (problem is None)
    assert found.exact == (problem is None)  # of these, in another order or spelling
    assert found.problem == problem if problem is None else found.problem.startswith(problem)


def test_strict_guides_are_judged_as_strictly(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text = '{"a": 1, "b": 2}'
    for strict in (False, True):
        found = verdict(engine, Guide.json_schema(schema, strict=strict), text, {"a": 1})
        assert (found.valid, found.exact) == (not strict, False)
        assert found.fields == {"/a": (1, 1)}


def test_reasoning_is_not_part_of_the_answer(engine: Engine) -> None:
    guide = COMPACT.after_reasoning("</t>")
    text = json.dumps(ANSWER, separators=(",", ":"))
    assert verdict(engine, guide, f"Well. </t>{text}", ANSWER).exact
    assert not verdict(engine, guide, text, ANSWER).valid
    perhaps = COMPACT.after_reasoning("</t>", start="<t>")
    assert verdict(engine, perhaps, f"<t>Well. </t>{text}", ANSWER).exact
    assert verdict(engine, perhaps, text, ANSWER).exact
    choice = Guide.choice(["yes", "no"]).after_reasoning("</t>")
    assert verdict(engine, choice, "So </t>yes", "yes") == Verdict(True, True, {"": (1, 1)})
    assert verdict(engine, choice, "So </t>ye", "yes").problem == (
        "it ends before the guide allows an end"
    )
    assert verdict(engine, Guide.choice(["yes"]), "yo", "yes").problem == (
        "token 2 of 2 does not fit the guide"
    )


def test_blanks_before_the_reasoning(engine: Engine) -> None:
    """They are legal where the answer may begin with them, whatever the start tag is."""
    text = json.dumps(ANSWER, separators=(",", ":"))
    user = TOKENIZER.convert_tokens_to_ids("<user>")
    for start in ("<t>", "<user>"):
        blank = Guide.choice(["\n yes", "no"]).after_reasoning("</t>", start=start)
        lean = Guide.choice(["yes"]).after_reasoning("</t>", start=start)
        document = COMPACT.after_reasoning("</t>", start=start)
        for guide, answer, value, is_valid in [
            (blank, "\n {}So </t>no", "no", True),
            (blank, "{}So </t>\n yes", "\n yes", True),
            (blank, "\n yes", "\n yes", True),
            (lean, "\n {}So </t>yes", "yes", False),
            (lean, "{}So </t>yes", "yes", True),
            (document, "\n{}So </t>" + text, ANSWER, False),
            (document, "{}So </t>" + text, ANSWER, True),
        ]:
            written = answer.replace("{}So", f"{start}So")
            tokens = tuple(TOKENIZER.encode(written))
            assert (user in tokens) == ("<user>" in written)
            shown = TOKENIZER.decode(tokens, skip_special_tokens=True)
            result = Result(shown, tokens, "stop", None, None, None, {})
            judge = Judge(engine.compiler.compile(guide), value, TOKENIZER, 1)
            found = judge.judge(result)
            assert (found.valid, found.exact) == (is_valid, is_valid), (start, written)


def test_equality_is_that_of_json() -> None:
    same = [(1, 1.0), ({"a": 1, "b": [None]}, {"b": [None], "a": 1}), (True, True), ("", "")]
    different = [
        (1, True),
        (0, False),
        (0, None),
        ([], {}),
        ("1", 1),
        ([1], [1, 1]),
        ({}, {"a": 1}),
    ]
    assert all(equal(*pair) and equal(*pair[::-1]) for pair in same)
    assert not any(equal(*pair) or equal(*pair[::-1]) for pair in different)


def test_leaves_have_pointers_and_fields() -> None:
    value = {"a/b": {"~": [1, {"c": None}]}, "7": [], "d": {}}
    assert [tuple(leaf) for leaf in leaves(value)] == [
        ("/a~1b/~0/0", "/a~1b/~0/*", 1),
        ("/a~1b/~0/1/c", "/a~1b/~0/*/c", None),
        ("/7", "/7", []),
        ("/d", "/d", {}),
    ]
    assert list(leaves(5)) == [("", "", 5)]
    assert expected_value(COMPACT, {"a": (1, 2)}) == {"a": [1, 2]} == parse('{"a": [1, 2]}')
