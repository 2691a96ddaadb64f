"""Drafts that a request asks for: what they are to the engine, and what is said about them."""

from typing import Any

import pytest

from gkv_jax import Sampling
from gkv_jax.serve.protocol.chat import ChatCompletionRequest
from tests.gkv_jax.serve.conftest import LIMITS, MODEL, Served
from tests.gkv_jax.serve.test_chat import ENDLESS, SCHEMA, schema_format, text_of


def sampling_of(**fields: Any) -> Sampling:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} | fields
    (sampling,) = ChatCompletionRequest.model_validate(body).answers(LIMITS)
    return sampling


def drafts_of(sampling: Sampling) -> tuple[str, bool, str | None, bool]:
    return sampling.jump, sampling.lookup, sampling.prediction, sampling.draft_model


@pytest.mark.parametrize("nothing", [{}, dict.fromkeys(("jump", "lookup", "prediction"))])
def test_drafts_are_those_of_sampling_unless_asked_otherwise(nothing: dict[str, Any]) -> None:
    assert drafts_of(sampling_of(**nothing)) == drafts_of(Sampling())


def test_each_field_has_its_meaning() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = sampling_of(
        jump="force",
        lookup=True,
        prediction={"type": "content", "content": parts},
        draft_model=False,
    )
    assert drafts_of(asked) == ("force", True, "a\nb", False)
    text = sampling_of(prediction={"type": "content", "content": "a\nb"})
    assert text.prediction == asked.prediction


def ask(served: Served, stream: bool = False, **extra: Any) -> Any:
    """A document of an ASCII schema, so that its text has the same tokens again."""
    fields = {"max_tokens": 400, "response_format": schema_format(SCHEMA)}
    return served.chat(**fields, stream=stream, extra_body={"jump": "off"} | extra)


def predict(text: str) -> dict[str, Any]:
    return {"type": "content", "content": text}


def test_a_right_prediction_saves_forward_passes_and_is_counted(served: Served) -> None:
    plain = ask(served)
    details = plain.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    assert plain.gkv["drafts"] == {}

    predicted = ask(served, prediction=predict(text_of(plain)))
    assert text_of(predicted) == text_of(plain)
    written = plain.usage.completion_tokens
    assert predicted.usage.completion_tokens == written
    # A step brings up to eight tokens, the stop token among them; its last one is no draft.
    forwards = -(-(written + 1) // 8)
    assert predicted.gkv["forwards"] == forwards
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == written + 1 - forwards
    assert details.rejected_prediction_tokens == 0
    assert plain.gkv["forwards"] == written + 1


def test_a_wrong_prediction_changes_nothing_but_the_count(served: Served) -> None:
    text = text_of(ask(served))
    other = {"km": "mile", "mile": "km"}
    unit = "km" if "km" in text else "mile"
    (*_, chunk, usage) = ask(
        served, stream=True, prediction=predict(text.replace(unit, other[unit])),
        stream_options={"include_usage": True},
    )  # fmt: skip
    details = usage.usage.completion_tokens_details
    tally = chunk.gkv["drafts"]["prediction"]
    assert tally["proposed"] > tally["accepted"] > 0
    assert details.accepted_prediction_tokens == tally["accepted"]
    assert details.rejected_prediction_tokens == tally["proposed"] - tally["accepted"]
    assert usage.usage.completion_tokens == len(text)  # a token is a byte


def test_lookup_drafts_from_the_text(served: Served) -> None:
    fields = {"temperature": 0, "max_tokens": 100, "response_format": schema_format(ENDLESS)}
    plain = served.chat(**fields)
    looked_up = served.chat(**fields, extra_body={"lookup": True})
    assert text_of(looked_up) == text_of(plain)
    assert "lookup" not in plain.gkv["drafts"]
    assert looked_up.gkv["drafts"]["lookup"]["accepted"] > 0


def test_jump_decides_what_becomes_of_forced_tokens(served: Served) -> None:
    texts = set()
    for jump, is_drafted in [("verify", True), ("force", True), ("off", False), (None, True)]:
        completion = ask(served, jump=jump)
        texts.add(text_of(completion))
        assert (completion.gkv["drafts"].get("forced", {}).get("accepted", 0) > 0) == is_drafted
    assert len(texts) == 1  # with a token per byte, text is segmented in one way only
