"""Counters in Prometheus' text format: right sums, once per request, each application for itself."""

import http.client
from typing import Any

import openai
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from gkv_jax.request import Request, RequestCancelled
from gkv_jax.serve.metrics import Metrics
from grammar_host import DeadEndError
from tests.gkv_jax.serve.conftest import LIMITS, Served, serving, wait_for
from tests.gkv_jax.serve.test_chat import ENDLESS, SCHEMA, schema_format, text_of

Samples = dict[tuple[str, ...], float]


def samples(text: str) -> Samples:
    """Values by name and labels in the order of their names, without the times at which series began."""
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def scrape(served: Served) -> Samples:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    assert response.status == 200
    assert response.headers["Content-Type"] == Metrics.MEDIA_TYPE
    text = response.read().decode()
    connection.close()
    return samples(text)


NOTHING = {
    ("gkv_requests_total", "stop"): 0.0,
    ("gkv_requests_total", "length"): 0.0,
    ("gkv_requests_total", "error"): 0.0,
    ("gkv_requests_total", "cancelled"): 0.0,
    ("gkv_completion_tokens_total",): 0.0,
    ("gkv_forward_passes_total",): 0.0,
}


def test_requests_are_counted_when_they_end(served: Served) -> None:
    """A registry per application: on the same engine, this one has seen nothing yet."""
    served.chat(max_tokens=2)
    with serving(served.engine, LIMITS) as fresh:
        assert scrape(fresh) == NOTHING
        guided: dict[str, Any] = {"max_tokens": 400, "response_format": schema_format(SCHEMA)}
        whole = fresh.chat(**guided)
        prediction = {"type": "content", "content": text_of(whole)}
        predicted = fresh.chat(**guided, extra_body={"jump": "off", "prediction": prediction})
        *_, cut = fresh.chat(stream=True, max_tokens=5, response_format=schema_format(ENDLESS))
        with pytest.raises(openai.BadRequestError):  # refused ones never were in the engine
            fresh.chat(temperature=-1)
        counted = scrape(fresh)

    stats = [whole.gkv, predicted.gkv, cut.gkv]
    expected = NOTHING | {
        ("gkv_requests_total", "stop"): 2,
        ("gkv_requests_total", "length"): 1,
        ("gkv_completion_tokens_total",): 2 * whole.usage.completion_tokens + 5,
        ("gkv_forward_passes_total",): sum(each["forwards"] for each in stats),
    }
    for source in {name for each in stats for name in each["drafts"]}:
        tallies = [each["drafts"][source] for each in stats if source in each["drafts"]]
        accepted = sum(tally["accepted"] for tally in tallies)
        proposed = sum(tally["proposed"] for tally in tallies)
        expected["gkv_draft_tokens_total", "accepted", source] = accepted
        expected["gkv_draft_tokens_total", "rejected", source] = proposed - accepted
    assert counted == expected
    assert counted["gkv_draft_tokens_total", "accepted", "prediction"] > 0
    assert not any(family.name.startswith("gkv_") for family in REGISTRY.collect())


def test_a_client_that_leaves_is_counted_as_such(served: Served) -> None:
    cancelled = ("gkv_requests_total", "cancelled")
    with serving(served.engine, LIMITS) as fresh:
        stream = fresh.chat(stream=True, max_tokens=20_000, response_format=schema_format(ENDLESS))
        for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        assert scrape(fresh)[cancelled] == 0
        stream.close()
        wait_for(lambda: scrape(fresh)[cancelled] == 1)
        assert scrape(fresh)["gkv_requests_total", "error"] == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [(DeadEndError("no legal token"), "error"), (RequestCancelled("gone"), "cancelled")],
)
def test_what_was_generated_before_an_error_counts(
    served: Served, error: Exception, reason: str
) -> None:
    request: Request = served.engine.prepare("hi")
    request.tokens += [1, 2]
    request.forwards = 3
    request.finish("error", error)
    metrics = Metrics()
    metrics.count(request)
    assert samples(metrics.text().decode()) == NOTHING | {
        ("gkv_requests_total", reason): 1,
        ("gkv_completion_tokens_total",): 2,
        ("gkv_forward_passes_total",): 3,
    }
