"""One request: what was asked, what has come so far, and what it cost."""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from gkv_jax.cache.report import CacheReport
from gkv_jax.drafts.drafter import Drafter
from gkv_jax.sampling import Sampling
from gkv_jax.text import TextStream
from grammar_host import Grammar

FinishReason = Literal["stop", "length", "error"]


class RequestCancelled(Exception):
    """The caller no longer wants the rest of this request."""


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities where a token was generated, by the model before grammar and sampling.

    Attributes:
      token: the token, and its natural ``logprob``.
      top: ids and log-probabilities of the most likely tokens, falling: ``Sampling.logprobs`` of them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def unpack(cls, token: int, line: np.ndarray, count: int) -> "TokenLogprobs":
        """From what the device reports, int32 ``[1+2k]`` (see ``gkv_jax.step.top_logprobs``)."""
        values, tokens = line[: len(line) // 2 + 1].view(np.float32), line[len(line) // 2 + 1 :]
        top = zip(tokens[:count].tolist(), values[1:].tolist(), strict=False)
        return cls(token, float(values[0]), tuple(top))


@dataclasses.dataclass(frozen=True)
class TokenTrace:
    """How a token came to be.

    Attributes:
      token: its id.
      text: what it decodes to alone, with U+FFFD for a part of a character; special tokens by name.
      legal: how many tokens the grammar allowed in its place; None without a grammar.
      source: ``sampled``, or the source of the draft that was verified (see ``Drafter.labels``):
        ``forced``, ``custom``, ``prediction``, ``lookup`` or ``model``.
    """

    token: int
    text: str
    legal: int | None
    source: str


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of the output, as it comes: ``text`` is final, ``tokens`` may be ahead of it.

    ``logprobs`` and ``trace``, where they were asked for, have one entry for each token.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    trace: tuple[TokenTrace, ...] = ()


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a request.

    Attributes:
      text: the output, without special tokens and without the stop text.
      tokens: ids of the output, without the stop token.
      finish_reason: ``stop`` (stop token or text), ``length`` (max_tokens or a full cache) or
        ``error``.
      error: why, where ``finish_reason`` is ``error``; what was generated before it is kept.
      logprobs: of each token, where ``Sampling.logprobs`` asked for them; else None.
      report: what the cache held of the text at its end, where it was asked for; else None.
      stats: ``prompt_tokens``, ``prefix_tokens`` (of these, not read but taken from a shared prefix),
        ``tokens``, ``forwards``, ``head_fraction`` (of the LM head that a
        forward read, on average, for the whole batch), ``queue_seconds`` (waiting for a slot),
        ``ttft_seconds`` (from submission to the first token; 0 if none came),
        ``seconds`` (prefill and decoding), ``tokens_per_second`` (of these seconds),
        ``tokens_per_forward``, ``drafts_proposed`` and ``drafts_accepted`` (draft tokens that were
        verified, and those that were right), ``drafts`` (the same by source, as ``{"forced":
        {"proposed": 12, "accepted": 12}, ...}``), ``grammar_us_per_token`` (host time to fill masks),
        ``compile_ms`` (grammar, the trial in a worker process included), ``cache_bytes`` (of the
        whole batch), ``evicted_tokens`` (of prompt and output, those that the cache no longer held at
        the end, in layers without a window of their own), ``backend`` and ``exact`` (whether the engine
        alone enforces the guide, without a completion gate).
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    error: Exception | None
    logprobs: tuple[TokenLogprobs, ...] | None
    report: CacheReport | None
    stats: dict[str, Any]


@dataclasses.dataclass(eq=False)
class Request:
    """The state of one request. The loop's host side writes it, one consumer reads its pieces."""

    prompt: tuple[int, ...]
    sampling: Sampling
    stop_token_ids: frozenset[int]
    text_stream: TextStream
    grammar: Grammar | None = None
    drafter: Drafter = dataclasses.field(default_factory=Drafter)
    wants_report: bool = False
    wants_trace: bool = False
    shares_prefix: bool = False
    """Whether the prompt, but for its last token, shall be kept for prompts that begin with it."""
    sink: Callable[[Piece | None], None] | None = None
    """Set before submitting, it takes each piece as it comes, then None, in place of ``pieces()``.
    The loop's host side calls it: it must neither block nor raise."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    forwards: int = 0
    head_read: float = 0.0
    """Times that the LM head was read, in parts of it."""
    fill_seconds: float = 0.0
    prefix_tokens: int = 0
    report: CacheReport | None = None
    cache_bytes: int = 0
    evicted_tokens: int = 0
    submitted: float = 0.0
    """Like the times below of ``time.perf_counter``, and 0 before."""
    admitted: float = 0.0
    first_token: float = 0.0
    """When the first token was emitted."""
    ended: float = 0.0
    cancellation: Exception | None = None
    """What the request shall end with, once somebody has cancelled it."""
    _pieces: "queue.SimpleQueue[Piece | None]" = dataclasses.field(
        default_factory=queue.SimpleQueue
    )
    _done: threading.Event = dataclasses.field(default_factory=threading.Event)

    def text_from(self, position: int) -> list[int]:
        """The tokens of prompt and output from a position on."""
        beyond = position - len(self.prompt)
        return self.tokens[beyond:] if beyond >= 0 else [*self.prompt[position:], *self.tokens]

    def read(self, tokens: list[int]) -> list[str]:
        """Text that becomes final with each token, no further than the token of a stop text."""
        texts = []
        for token in tokens:
            texts.append(self.text_stream.push(token))
            if self.text_stream.stopped:
                break
        return texts

    def emit(
        self,
        tokens: list[int],
        texts: list[str],
        logprobs: np.ndarray,
        trace: tuple[TokenTrace, ...] = (),
    ) -> None:
        """Add generated tokens (no stop token among them) and stream out their text.

        ``logprobs`` is int32 ``[>= tokens, 1+2k]``, read where the request asks for it; ``trace`` has
        an entry for each token, or none.
        """
        self.tokens += tokens
        if tokens:
            self.first_token = self.first_token or time.perf_counter()
        new: tuple[TokenLogprobs, ...] = ()
        if (count := self.sampling.logprobs) is not None:
            lines = zip(tokens, logprobs, strict=False)
            new = tuple(TokenLogprobs.unpack(token, line, count) for token, line in lines)
            self.logprobs += new
        self._stream("".join(texts), tuple(tokens), new, trace)

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        """End the request; the first call counts."""
        if self.finish_reason is not None:
            return
        self.finish_reason, self.error = reason, error
        self.ended = self.ended or time.perf_counter()
        try:
            # After an error the stream may hold text of tokens that do not count.
            if error is None:
                self._stream(self.text_stream.flush())
        finally:
            self._done.set()
            self._put(None)

    @property
    def cancelled(self) -> bool:
        """Whether somebody has cancelled it."""
        return self.cancellation is not None

    def cancel(self, error: Exception | None = None) -> None:
        """Ask the engine to give up this request; its slot is free a step or two later.

        It ends with ``error``, ``RequestCancelled`` if None; the first call counts.
        """
        if self.cancellation is None:
            self.cancellation = error or RequestCancelled("the request was cancelled")

    def pieces(self) -> Iterator[Piece]:
        """The output as it comes, until the request ends (for whatever reason)."""
        while (piece := self._pieces.get()) is not None:
            yield piece

    def result(self) -> Result:
        """Wait for the end."""
        self._done.wait()
        assert self.finish_reason is not None
        return Result(
            text="".join(self.texts),
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason,
            error=self.error,
            logprobs=None if self.sampling.logprobs is None else tuple(self.logprobs),
            report=self.report,
            stats=self._stats(),
        )

    def _stream(
        self,
        text: str,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        trace: tuple[TokenTrace, ...] = (),
    ) -> None:
        if text:
            self.texts.append(text)
        if text or tokens:
            self._put(Piece(text, tokens, logprobs, trace))

    def _put(self, piece: Piece | None) -> None:
        if self.sink is None:
            self._pieces.put(piece)
            return
        try:
            self.sink(piece)
        except Exception:  # a reader that fails is one that has left
            self.cancel()

    def _stats(self) -> dict[str, Any]:
        began = self.admitted or self.ended
        seconds = self.ended - began
        count, tallies = len(self.tokens), self.drafter.tallies
        return {
            "prompt_tokens": len(self.prompt),
            "prefix_tokens": self.prefix_tokens,
            "tokens": count,
            "forwards": self.forwards,
            "head_fraction": self.head_read / max(self.forwards, 1),
            "queue_seconds": began - self.submitted if self.submitted else 0.0,
            "ttft_seconds": self.first_token - self.submitted if self.first_token else 0.0,
            "seconds": seconds,
            "tokens_per_second": count / seconds if seconds > 0 else 0.0,
            "tokens_per_forward": count / max(self.forwards, 1),
            "drafts_proposed": sum(tally.proposed for tally in tallies.values()),
            "drafts_accepted": sum(tally.accepted for tally in tallies.values()),
            "drafts": {name: dataclasses.asdict(tally) for name, tally in tallies.items()},
            "grammar_us_per_token": 1e6 * self.fill_seconds / max(count, 1),
            "compile_ms": 1e3 * _compile_seconds(self.grammar),
            "cache_bytes": self.cache_bytes,
            "evicted_tokens": self.evicted_tokens,
            "backend": self.grammar.backend if self.grammar else None,
            "exact": self.grammar.exact if self.grammar else None,
        }


def _compile_seconds(grammar: Grammar | None) -> float:
    return 0.0 if grammar is None else grammar.plan_seconds + grammar.compile_seconds


class Stream(Iterator[Piece]):
    """The pieces of a request as they come; at the end it raises what ended the request, if anything.

    Dropping it, begun or not, cancels what has not come yet.
    """

    def __init__(self, request: Request) -> None:
        """``request`` is submitted, or about to be."""
        self._request, self._pieces, self._raised = request, request.pieces(), False

    def __next__(self) -> Piece:
        for piece in self._pieces:
            return piece
        if self._request.error is not None and not self._raised:
            self._raised = True
            raise self._request.error
        raise StopIteration

    def close(self) -> None:
        """Give up the rest."""
        self._request.cancel()

    def __del__(self) -> None:
        self.close()
