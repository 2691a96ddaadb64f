"""Figures in Prometheus' text format: right sums, once per request, each application for itself."""

import http.client
import logging
from typing import Any

import openai
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

import gkv_jax
from gkv_jax.errors import EngineClosedError
from gkv_jax.request import Request, RequestCancelled
from gkv_jax.serve.metrics import Gauges, Metrics
from grammar_host import DeadEndError, Guide
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


COUNTERS = (
    "gkv_requests", "gkv_prompt_tokens", "gkv_completion_tokens", "gkv_forward_passes",
    "gkv_draft_tokens", "gkv_evicted_tokens", "gkv_dead_ends",
)  # fmt: skip

NOTHING = {
    ("gkv_requests_total", "stop"): 0.0,
    ("gkv_requests_total", "length"): 0.0,
    ("gkv_requests_total", "error"): 0.0,
    ("gkv_requests_total", "cancelled"): 0.0,
    ("gkv_prompt_tokens_total",): 0.0,
    ("gkv_completion_tokens_total",): 0.0,
    ("gkv_forward_passes_total",): 0.0,
    ("gkv_evicted_tokens_total",): 0.0,
    ("gkv_dead_ends_total",): 0.0,
}


def counters(values: Samples) -> Samples:
    """Those of requests of the engine."""
    return {
        key: value for key, value in values.items() if key[0].removesuffix("_total") in COUNTERS
    }


def test_requests_are_counted_when_they_end(served: Served) -> None:
    """A registry per application: on the same engine, this one has seen nothing yet."""
    served.chat(max_tokens=2)
    with serving(served.engine, LIMITS) as fresh:
        assert counters(scrape(fresh)) == NOTHING
        guided: dict[str, Any] = {"max_tokens": 400, "response_format": schema_format(SCHEMA)}
        whole = fresh.chat(**guided)
        prediction = {"type": "content", "content": text_of(whole)}
        predicted = fresh.chat(**guided, extra_body={"jump": "off", "prediction": prediction})
        *_, cut = fresh.chat(stream=True, max_tokens=5, response_format=schema_format(ENDLESS))
        with pytest.raises(openai.BadRequestError):  # refused ones never were in the engine
            fresh.chat(temperature=-1)
        counted = counters(scrape(fresh))

    stats = [whole.gkv, predicted.gkv, cut.gkv]
    expected = NOTHING | {
        ("gkv_requests_total", "stop"): 2,
        ("gkv_requests_total", "length"): 1,
        ("gkv_prompt_tokens_total",): sum(each["prompt_tokens"] for each in stats),
        ("gkv_evicted_tokens_total",): sum(each["evicted_tokens"] for each in stats),
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
    ("error", "reason", "dead_ends"),
    [
        (DeadEndError("no legal token"), "error", 1),
        (EngineClosedError("closed"), "error", 0),
        (RequestCancelled("gone"), "cancelled", 0),
    ],
)
def test_what_was_generated_before_an_error_counts(
    served: Served, error: Exception, reason: str, dead_ends: int
) -> None:
    request: Request = served.engine.prepare("hi")
    request.tokens += [1, 2]
    request.forwards, request.evicted_tokens = 3, 4
    request.finish("error", error)
    metrics = Metrics()
    metrics.count(request)
    values = samples(metrics.text().decode())
    assert counters(values) == NOTHING | {
        ("gkv_requests_total", reason): 1,
        ("gkv_prompt_tokens_total",): 2,
        ("gkv_completion_tokens_total",): 2,
        ("gkv_forward_passes_total",): 3,
        ("gkv_evicted_tokens_total",): 4,
        ("gkv_dead_ends_total",): dead_ends,
    }
    # When a client left says nothing about how fast the server is.
    assert values["gkv_request_seconds_count",] == 0


def ended(served: Served, count: int, guide: Guide | None = None) -> Request:
    """A request with times that add up: 1 s in the queue, 2 s to the first token, 8 s to the end."""
    request = served.engine.prepare("hi", guide)
    request.tokens += [1] * count
    request.submitted, request.admitted, request.ended = 100.0, 101.0, 108.0
    request.first_token = 102.0 if count else 0.0
    request.fill_seconds = 1e-5 * count
    request.finish("length")
    return request


HISTOGRAMS = {
    "gkv_queue_seconds": 1.0,
    "gkv_request_seconds": 8.0,
    "gkv_time_to_first_token_seconds": 2.0,
    "gkv_time_per_output_token_seconds": 2.0,
    "gkv_grammar_fill_seconds": 1e-5,
}


@pytest.mark.parametrize(
    ("count", "is_guided", "absent"),
    [
        (4, True, ()),
        (4, False, ("gkv_grammar_fill_seconds",)),
        (1, True, ("gkv_time_per_output_token_seconds",)),
        (0, True, tuple(HISTOGRAMS)[2:]),
    ],
)
def test_times_are_in_histograms(
    served: Served, count: int, is_guided: bool, absent: tuple[str, ...]
) -> None:
    metrics = Metrics()
    request = ended(served, count, Guide.json() if is_guided else None)
    for _ in range(3):
        metrics.count(request)
    values = samples(metrics.text().decode())
    for name, seconds in HISTOGRAMS.items():
        expected = 0 if name in absent else 3
        assert values[f"{name}_count",] == expected
        assert values[f"{name}_sum",] == pytest.approx(expected * seconds)
        buckets = [(float(key[1]), v) for key, v in values.items() if key[0] == f"{name}_bucket"]
        for bound, below in buckets:
            assert below == (expected if bound >= seconds * (1 - 1e-9) else 0)
    compiled = {
        key[1:]: v for key, v in values.items() if key[0] == "gkv_grammar_compile_seconds_count"
    }
    backend = request.result().stats["backend"]
    assert compiled == ({(backend,): 3} if is_guided else {})


def test_gauges_are_read_at_each_scrape() -> None:
    waiting = [5]
    metrics = Metrics(
        Gauges("a", slots=8, cache_bytes=1000, queued=lambda: waiting[0], active=lambda: 3)
    )
    expected = {
        ("gkv_info", "a", gkv_jax.__version__): 1,
        ("gkv_queue_length",): 5,
        ("gkv_active_slots",): 3,
        ("gkv_slots",): 8,
        ("gkv_cache_bytes",): 1000,
    }
    assert expected.items() <= samples(metrics.text().decode()).items()
    waiting[0] = 6
    assert samples(metrics.text().decode())["gkv_queue_length",] == 6


@pytest.mark.parametrize(("stream", "status"), [(True, "200"), (False, "504")])
def test_a_failed_answer_is_in_log_and_figures_streamed_or_not(
    served: Served, caplog: pytest.LogCaptureFixture, stream: bool, status: str
) -> None:
    """Though the status of a stream was sent before it failed."""
    caplog.set_level(logging.INFO, "gkv_jax.serve.access")
    endless: dict[str, Any] = {"max_tokens": 20_000, "response_format": schema_format(ENDLESS)}
    with serving(served.engine, LIMITS) as fresh:
        with pytest.raises(openai.APIError):
            list(fresh.chat(stream=stream, extra_body={"timeout": 0.5}, **endless))
        rejected = ("gkv_rejected_requests_total", "request_timeout", status)
        wait_for(lambda: scrape(fresh).get(rejected) == 1)
    lines = [record.getMessage() for record in caplog.records]
    (line,) = [line for line in lines if "/v1/chat/completions" in line]
    assert f"status={status} " in line
    assert line.endswith("error_code=request_timeout") or "error_code=request_timeout " in line


def test_labels_of_http_requests_are_few_whatever_clients_send() -> None:
    metrics = Metrics()
    for number in range(10):
        metrics.observe_http("", f"METHOD{number}", 404, "unknown_url")
    metrics.observe_http("/v1/models", "GET", 200, None)
    metrics.observe_http("/v1/models", "GET", 429, None)
    metrics.observe_http("/v1/stream", "POST", 200, "request_timeout")
    values = samples(metrics.text().decode())
    assert {key[1:]: v for key, v in values.items() if key[0] == "gkv_http_requests_total"} == {
        ("other", "other", "404"): 10,
        ("GET", "/v1/models", "200"): 1,
        ("GET", "/v1/models", "429"): 1,
        ("POST", "/v1/stream", "200"): 1,
    }
    assert {key[1:]: v for key, v in values.items() if key[0] == "gkv_rejected_requests_total"} == {
        ("unknown_url", "404"): 10,
        ("other", "429"): 1,
        ("request_timeout", "200"): 1,
    }
