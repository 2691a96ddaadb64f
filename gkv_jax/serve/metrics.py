"""What a server has done since its start, in Prometheus' text format.

Each application has a registry of its own, so that several in one process do not add up.
"""

from typing import ClassVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest

from gkv_jax.request import Request, RequestCancelled, Result

_CANCELLED = "cancelled"


class Metrics:
    """Counters of one application. Any thread may count and read."""

    MEDIA_TYPE: ClassVar[str] = CONTENT_TYPE_LATEST
    """Of ``text()``."""

    def __init__(self) -> None:
        """Everything starts at 0."""
        self._registry = CollectorRegistry()
        self._requests = self._counter(
            "gkv_requests", "Requests that ended, by the reason.", "finish_reason"
        )
        for reason in ("stop", "length", "error", _CANCELLED):
            self._requests.labels(reason)  # a series that appears at 1 has no rate before its 2
        self._completion_tokens = self._counter(
            "gkv_completion_tokens", "Tokens in the answers of requests that ended."
        )
        self._forward_passes = self._counter(
            "gkv_forward_passes",
            "Forward passes of requests that ended; one that several shared counts for each of them.",
        )
        self._draft_tokens = self._counter(
            "gkv_draft_tokens", "Draft tokens that were verified.", "source", "outcome"
        )

    def count(self, request: Request) -> None:
        """Count a request that has ended."""
        result = request.result()
        self._requests.labels(_reason(result)).inc()
        self._completion_tokens.inc(len(result.tokens))
        self._forward_passes.inc(result.stats["forwards"])
        for source, drafts in result.stats["drafts"].items():
            accepted, proposed = drafts["accepted"], drafts["proposed"]
            self._draft_tokens.labels(source, "accepted").inc(accepted)
            self._draft_tokens.labels(source, "rejected").inc(proposed - accepted)

    def text(self) -> bytes:
        """All of it, for a scraper."""
        return generate_latest(self._registry)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, labels, registry=self._registry)


def _reason(result: Result) -> str:
    """The finish reason, but a client that left is no error of the server."""
    return _CANCELLED if isinstance(result.error, RequestCancelled) else result.finish_reason
