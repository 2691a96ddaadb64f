"""Where the compiled loop meets the host: ``submit`` and ``collect``, and the session behind them.

A step has one conversation. ``submit`` takes what the device sampled, advances the grammars, streams
tokens out, and answers at once with the next inputs, while a worker thread fills the masks for them.
``collect`` asks for the masks after the model's forward pass, so filling and forward overlap. Both
hang on data: the forward consumes what ``submit`` returned, ``collect`` a number computed from the
hidden states. Nothing else keeps XLA from scheduling them where they would be of no use.

The callbacks are total. They touch NumPy and Python only (a callback that calls JAX can deadlock the
runtime), they take no lock that a thread inside JAX might hold, and they never raise: what goes wrong
with a row ends that row's request and leaves the others alone.
"""

import dataclasses
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from gkv_jax.cache import CacheSpec
from gkv_jax.request import FinishReason, Request, RequestCancelled
from grammar_host import GuidedBatch

# The one piece of global state: a compiled loop outlives sessions, so it names them by number.
_sessions: "weakref.WeakValueDictionary[int, Session]" = weakref.WeakValueDictionary()
_handles = itertools.count(1)


class GrammarTimeout(RuntimeError):
    """Filling the masks of a step took longer than the watchdog allows."""


@dataclasses.dataclass
class _Row:
    """A slot's request and the inputs of its next step."""

    request: Request
    position: int
    tokens: list[int]
    """The last accepted token, then the drafts."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """A request whose row of the cache is to be read before anyone else writes to it."""

    slot: int
    request: Request
    position: int
    """Tokens of the text that are in the cache."""
    reason: FinishReason


class _FillWorker:
    """A thread that calls ``fill`` once for every ``start``.

    Daemonic and without reference to the session: a fill that never returns can keep neither the
    process nor the session alive.
    """

    def __init__(self, fill: Callable[[], None]) -> None:
        self._tasks: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        arguments = (fill, self._tasks, self._done)
        threading.Thread(target=self._run, args=arguments, name="gkv-fill", daemon=True).start()

    def start(self) -> None:
        self._tasks.put(True)

    def wait(self, timeout_s: float) -> bool:
        """Whether the last started fill is done by then."""
        try:
            self._done.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True

    def close(self) -> None:
        self._tasks.put(False)

    @staticmethod
    def _run(
        fill: Callable[[], None],
        tasks: "queue.SimpleQueue[bool]",
        done: "queue.SimpleQueue[None]",
    ) -> None:
        while tasks.get():
            fill()
            done.put(None)


class Session:
    """The host side of a batch: who sits in which slot, and what the next step needs.

    Threads: the engine's thread calls ``admit``, ``inputs`` and ``fail_all`` between loop runs; the
    runtime's threads call ``submit`` and ``collect`` during one, never both at once; the worker fills
    masks between a ``submit`` and its ``collect``. So nothing here needs a lock.
    """

    def __init__(
        self,
        spec: CacheSpec,
        slots: int,
        vocab_size: int,
        *,
        max_tokens: int | None = None,
        watchdog_s: float = 60.0,
        wants_pause: Callable[[], bool] = lambda: False,
    ) -> None:
        """A session without requests.

        Args:
          spec: the cache's. slots: B. vocab_size: V.
          max_tokens: text length at which a request ends with ``length``; None if there is none.
          watchdog_s: longest wait for a step's masks.
          wants_pause: asked after each step whether the engine has something to do.
        """
        self.handle = next(_handles)
        self.broken = False
        """A fill did not come back: the session must be replaced, its thread still holds matchers."""
        self._spec, self._max_tokens = spec, max_tokens
        self._vocab_size = vocab_size
        self._watchdog_s, self._wants_pause = watchdog_s, wants_pause
        self._rows: list[_Row | None] = [None] * slots
        self._ended: list[Ended] = []
        self._batch = batch = GuidedBatch(slots, spec.max_drafts, vocab_size)
        self._masks = masks = np.full(batch.mask_shape, -1, np.int32)
        self._enabled = enabled = np.zeros(batch.mask_shape[:2], np.int32)
        self._worker = _FillWorker(lambda: batch.fill(masks, enabled))
        self.close = weakref.finalize(self, self._worker.close)
        """Let the worker thread end; whoever forgets to call it does so by dropping the session."""
        _sessions[self.handle] = self

    # Between loop runs ------------------------------------------------------------------------

    @property
    def free_slots(self) -> list[int]:
        """Slots without a request."""
        return [slot for slot, row in enumerate(self._rows) if row is None]

    def take_ended(self) -> list[Ended]:
        """Requests that have ended but want a report of their row first; the caller finishes them."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def any_active(self) -> bool:
        """Whether a step would do anything."""
        return any(row is not None for row in self._rows)

    def admit(self, slot: int, request: Request) -> None:
        """Seat a request whose prompt, but for the last token, is in the cache's row ``slot``.

        Raises:
          Exception: whatever its grammar or draft source raises; the slot stays free.
        """
        grammar = request.grammar
        matcher = grammar.matcher(stop_token_ids=request.stop_token_ids) if grammar else None
        row = _Row(request, position=len(request.prompt) - 1, tokens=[request.prompt[-1]])
        self._batch.admit(slot, matcher)
        try:
            self._propose(slot, row)
        except BaseException:
            self._batch.release(slot)
            raise
        self._rows[slot] = row

    def inputs(self) -> np.ndarray:
        """Inputs of the next step (the format that ``submit`` returns), and start filling for it."""
        return self._answer(go=self.any_active)

    def positions(self) -> np.ndarray:
        """True position of each row's next token, int32 ``[B]``."""
        return np.array([row.position if row else 0 for row in self._rows], np.int32)

    def fail_all(self, error: Exception) -> None:
        """End every request with ``error``."""
        for ended in self.take_ended():
            ended.request.finish(ended.reason)
        for slot, row in enumerate(self._rows):
            if row is not None:
                self._finish(slot, row, error=error)

    # During a loop run ------------------------------------------------------------------------

    def submit(self, sampled: np.ndarray) -> np.ndarray:
        """Take a step's tokens and return the next inputs. Never raises.

        Args:
          sampled: int32 ``[B, N+2+...]``: N sampled tokens, how many of them count, how many rows of
            the LM head were read for them, and log-probabilities (see ``decode.top_logprobs``).

        Returns:
          int32 ``[B, N+4]``: N input tokens, the number of drafts among them, whether the row is
          active, whether it wants log-probabilities, and (the same in all rows) whether the loop
          goes on.
        """
        n = self._spec.queries
        for slot, row in enumerate(self._rows):
            if row is not None:
                try:
                    count = int(sampled[slot, n])
                    row.request.head_read += int(sampled[slot, n + 1]) / self._vocab_size
                    logprobs = sampled[slot, n + 2 :].reshape(n, -1)[:count]
                    self._advance(slot, row, sampled[slot, :count].tolist(), logprobs)
                except BaseException as error:  # one row's trouble (even a panic) is its alone
                    self._finish(slot, row, error=_as_exception(error))
        pauses = bool(self._ended) or self._wants_pause()
        return self._answer(go=self.any_active and not pauses)

    def collect(self) -> np.ndarray:
        """Masks of the step and, as a last word, whether they are enabled: int32 ``[B,N,W+1]``.

        Never raises.
        """
        enabled = self._enabled
        if not self._worker.wait(self._watchdog_s):
            self.broken = True
            error = GrammarTimeout(
                f"the grammar's masks were not ready after {self._watchdog_s:g} s"
            )
            for slot, row in enumerate(self._rows):
                if row is not None:
                    # Not through the batch: the stuck thread may still be at work in it.
                    row.request.finish("error", error)
                    self._rows[slot] = None
            enabled = np.zeros_like(enabled)  # whatever is sampled goes nowhere
        # One array for one transfer; and a copy, which the next fill cannot change under the reader.
        return np.concatenate([self._masks, enabled[:, :, None]], axis=2)

    # Helpers ------------------------------------------------------------------------------------

    def _advance(self, slot: int, row: _Row, sampled: list[int], logprobs: np.ndarray) -> None:
        """Account for what the device says a row produced; ``logprobs`` has a line for each token."""
        request = row.request
        request.forwards += 1
        request.drafts_proposed += len(row.tokens) - 1
        request.drafts_accepted += len(sampled) - 1
        if request.cancelled:
            raise RequestCancelled("the request was cancelled")
        emitted, reason = self._cut(request, sampled)
        # Text first: a stop text ends the output before whatever was verified behind it.
        texts = request.read([t for t in emitted if t not in request.stop_token_ids])
        if request.text_stream.stopped:
            emitted, reason = emitted[: len(texts)], "stop"
        accepted = self._batch.advance(slot, emitted)
        request.fill_seconds = self._batch.counters(slot).fill_seconds
        counted = [t for t in emitted[:accepted] if t not in request.stop_token_ids]
        request.emit(counted, texts[: len(counted)], logprobs)
        failure = self._batch.failure(slot)
        if failure is not None:
            raise failure
        row.position += len(emitted)
        if reason is None and self._max_tokens is not None and row.position >= self._max_tokens:
            reason = "length"
        if reason is not None:
            self._finish(slot, row, reason)
            return
        row.tokens = [emitted[-1]]
        self._propose(slot, row)

    @staticmethod
    def _cut(request: Request, sampled: list[int]) -> tuple[list[int], FinishReason | None]:
        """The tokens up to the request's end, and the reason if that is where they end."""
        room = request.sampling.max_tokens - len(request.tokens)
        for index, token in enumerate(sampled):
            if token in request.stop_token_ids:
                return sampled[: index + 1], "stop"
            if index + 1 >= room:
                return sampled[: index + 1], "length"
        return sampled, None

    def _propose(self, slot: int, row: _Row) -> None:
        room = self._spec.room_for_drafts(row.position)
        if self._max_tokens is not None:
            room = min(room, self._max_tokens - 1 - row.position)
        source = row.request.drafts
        drafts = list(source.propose(row.request.tokens, room)[:room]) if source and room else []
        row.tokens = row.tokens[:1] + self._batch.propose(slot, drafts)

    def _finish(
        self,
        slot: int,
        row: _Row,
        reason: FinishReason = "error",
        error: Exception | None = None,
    ) -> None:
        self._rows[slot] = None
        self._batch.release(slot)
        if row.request.wants_report and error is None:
            row.request.ended = time.perf_counter()  # the report takes no part of its time
            self._ended.append(Ended(slot, row.request, row.position, reason))
        else:
            row.request.finish(reason, error)

    def _answer(self, *, go: bool) -> np.ndarray:
        n = self._spec.queries
        answer = np.zeros((len(self._rows), n + 4), np.int32)
        for slot, row in enumerate(self._rows):
            if row is not None:
                answer[slot, : len(row.tokens)] = row.tokens
                answer[slot, n] = len(row.tokens) - 1
                answer[slot, n + 1] = 1
                answer[slot, n + 2] = row.request.sampling.logprobs is not None
        answer[:, n + 3] = go
        if go:
            self._worker.start()
        return answer


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def submit(handle: jax.Array, sampled: jax.Array, n: int) -> jax.Array:
    """``Session.submit`` of ``n`` queries inside a compiled program: to ``[B,N+4]``, int32."""
    out = jax.ShapeDtypeStruct((sampled.shape[0], n + 4), jnp.int32)
    return io_callback(_submit, out, handle, sampled)


def collect(handle: jax.Array, after: jax.Array, vocab_size: int) -> jax.Array:
    """``Session.collect`` once ``after [B,N,...]`` is computed: ``[B,N,W+1]`` int32."""
    batch, n = after.shape[:2]
    out = jax.ShapeDtypeStruct((batch, n, -(-vocab_size // 32) + 1), jnp.int32)
    return io_callback(_collect, out, handle, after.reshape(-1)[0])


def _submit(handle: jax.Array, sampled: jax.Array) -> np.ndarray:
    return _sessions[int(np.asarray(handle))].submit(np.asarray(sampled))


def _collect(handle: jax.Array, ready: jax.Array) -> np.ndarray:
    return _sessions[int(np.asarray(handle))].collect()
