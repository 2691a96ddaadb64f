"""What a server does and has done since its start, in Prometheus' text format.

Each application has a registry of its own, so that several in one process do not add up.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    generate_latest,
)

import gkv_jax
from gkv_jax.request import Request, RequestCancelled, Result
from grammar_host import DeadEndError

_CANCELLED = "cancelled"
_OTHER = "other"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

# Upper bounds in seconds. A step takes a millisecond on an accelerator and a tenth of a second on a CPU;
# a request takes from one step to many minutes.
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_WAIT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_COMPILE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_FILL = (1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 1e-2)


@dataclasses.dataclass(frozen=True)
class Gauges:
    """What is true now. Functions are called at each scrape, by any thread.

    Attributes:
      model: what clients call the model.
      slots: requests decoded at once.
      cache_bytes: of all slots.
      queued: requests that wait for a slot.
      active: slots that are taken.
    """

    model: str
    slots: int
    cache_bytes: int
    queued: Callable[[], int]
    active: Callable[[], int]


class Metrics:
    """Figures of one application. Any thread may count and read."""

    MEDIA_TYPE: ClassVar[str] = CONTENT_TYPE_LATEST
    """Of ``text()``."""

    def __init__(self, gauges: Gauges | None = None) -> None:
        """Everything starts at 0. Without ``gauges`` there are counters and histograms only."""
        self._registry = CollectorRegistry()
        if gauges is not None:
            self._add(gauges)
        self._requests = self._counter(
            "gkv_requests", "Requests that ended, by the reason.", "finish_reason"
        )
        for reason in ("stop", "length", "error", _CANCELLED):
            self._requests.labels(reason)  # a series that appears at 1 has no rate before its 2
        self._prompt_tokens = self._counter(
            "gkv_prompt_tokens", "Tokens in the prompts of requests that ended."
        )
        self._completion_tokens = self._counter(
            "gkv_completion_tokens", "Tokens in the answers of requests that ended."
        )
        self._forward_passes = self._counter(
            "gkv_forward_passes",
            "Forward passes of requests that ended; one that several shared counts for each of them.",
        )
        self._evicted_tokens = self._counter(
            "gkv_evicted_tokens",
            "Tokens of prompts and answers that the cache did not hold any more at the end.",
        )
        self._dead_ends = self._counter(
            "gkv_dead_ends", "Requests that failed because the grammar left no token to choose."
        )
        self._draft_tokens = self._counter(
            "gkv_draft_tokens", "Draft tokens that were verified.", "source", "outcome"
        )
        self._http_requests = self._counter(
            "gkv_http_requests", "HTTP requests that were answered.", "route", "method", "status"
        )
        self._rejected = self._counter(
            "gkv_rejected_requests",
            "HTTP requests answered with an error, or by a stream that ended with one.",
            "status",
            "code",
        )
        self._first_token = self._histogram(
            "gkv_time_to_first_token_seconds",
            "From arrival in the queue to the first token.",
            _WAIT,
        )
        self._per_token = self._histogram(
            "gkv_time_per_output_token_seconds", "Per token after a request's first.", _STEP
        )
        self._whole = self._histogram(
            "gkv_request_seconds", "From arrival in the queue to the end.", _WHOLE
        )
        self._queue = self._histogram("gkv_queue_seconds", "Waiting for a slot.", _WAIT)
        self._compile = self._histogram(
            "gkv_grammar_compile_seconds", "Compiling a request's grammar.", _COMPILE, "backend"
        )
        self._fill = self._histogram(
            "gkv_grammar_fill_seconds", "Filling masks, per token of a guided request.", _FILL
        )

    def count(self, request: Request) -> None:
        """Count a request that has ended."""
        result = request.result()
        stats = result.stats
        self._requests.labels(_reason(result)).inc()
        self._prompt_tokens.inc(stats["prompt_tokens"])
        self._completion_tokens.inc(stats["tokens"])
        self._forward_passes.inc(stats["forwards"])
        self._evicted_tokens.inc(stats["evicted_tokens"])
        if isinstance(result.error, DeadEndError):
            self._dead_ends.inc()
        for source, drafts in stats["drafts"].items():
            accepted, proposed = drafts["accepted"], drafts["proposed"]
            self._draft_tokens.labels(source, "accepted").inc(accepted)
            self._draft_tokens.labels(source, "rejected").inc(proposed - accepted)
        if stats["backend"] is not None:
            self._compile.labels(stats["backend"]).observe(stats["compile_ms"] / 1e3)
        self._observe_times(result)

    def observe_http(self, route: str, method: str, status: int, code: str | None) -> None:
        """Count an HTTP request that was answered.

        Args:
          route: the template of its path; empty where no route matched.
          method: as it was sent.
          status: of the answer.
          code: of OpenAI's error, if that was the answer or the end of a stream.
        """
        # What clients choose freely is no label: each new value would be a series for ever.
        method = method if method in _METHODS else _OTHER
        self._http_requests.labels(route or _OTHER, method, str(status)).inc()
        if status >= 400 or code is not None:
            self._rejected.labels(str(status), code or _OTHER).inc()

    def text(self) -> bytes:
        """All of it, for a scraper."""
        return generate_latest(self._registry)

    def _observe_times(self, result: Result) -> None:
        """Of requests that ran to their end: the times of others say when clients left."""
        if result.error is not None:
            return
        stats, count = result.stats, len(result.tokens)
        whole, first = stats["queue_seconds"] + stats["seconds"], stats["ttft_seconds"]
        self._whole.observe(whole)
        self._queue.observe(stats["queue_seconds"])
        if count > 0:
            self._first_token.observe(first)
            if stats["backend"] is not None:
                self._fill.observe(stats["grammar_us_per_token"] / 1e6)
        if count > 1:
            self._per_token.observe((whole - first) / (count - 1))

    def _add(self, gauges: Gauges) -> None:
        info = Info("gkv", "What is served.", registry=self._registry)
        info.info({"version": gkv_jax.__version__, "model": gauges.model})
        self._gauge("gkv_queue_length", "Requests that wait for a slot.", gauges.queued)
        self._gauge("gkv_active_slots", "Slots that are taken.", gauges.active)
        self._gauge("gkv_slots", "Requests decoded at once.", lambda: gauges.slots)
        self._gauge("gkv_cache_bytes", "Of all slots.", lambda: gauges.cache_bytes)

    def _gauge(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        Gauge(name, documentation, registry=self._registry).set_function(read)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, labels, registry=self._registry)

    def _histogram(
        self, name: str, documentation: str, bounds: Sequence[float], *labels: str
    ) -> Histogram:
        return Histogram(name, documentation, labels, buckets=bounds, registry=self._registry)


def _reason(result: Result) -> str:
    """The finish reason, but a client that left is no error of the server."""
    return _CANCELLED if isinstance(result.error, RequestCancelled) else result.finish_reason
