"""Where the compiled loop meets the host: ``submit`` and ``collect``, and the session behind them.

A step has one conversation. ``submit`` takes what the device sampled, advances the grammars, streams
tokens out, and answers at once with the next inputs, while a worker thread fills the masks for them.
``collect`` asks for the masks after the model's forward pass, so filling and forward overlap. Both
hang on data: the forward consumes what ``submit`` returned, ``collect`` a number computed from the
hidden states. Nothing else keeps XLA from scheduling them where they would be of no use.

A third callback, ``collect_bias``, is in a branch that only steps with a biased row take.

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

from gkv_jax.bias import LogitBias
from gkv_jax.cache import CacheSpec
from gkv_jax.drafts.widths import Program, Verify, Widths
from gkv_jax.request import FinishReason, Request, TokenTrace
from grammar_host import GuidedBatch

# The one piece of global state: a compiled loop outlives sessions, so it names them by number.
_sessions: "weakref.WeakValueDictionary[int, Session]" = weakref.WeakValueDictionary()
_handles = itertools.count(1)

STOP, VERIFY, READ_ONE, READ_MANY = range(4)
"""What an answer says is next: leave the loop, a step, or a pass of the draft model in which each row
reads at most one token, or as many as a step has."""

WANTS_LOGPROBS, IS_BIASED = 1, 2
"""Bits of what a row asks of a step."""


class GrammarTimeout(RuntimeError):
    """Filling the masks of a step took longer than the watchdog allows."""


@dataclasses.dataclass
class _Row:
    """A slot's request and the inputs of its next step."""

    request: Request
    position: int
    last: int
    """The last accepted token; it is the step's input at ``position``."""
    room: int = 0
    """Drafts that the next step has room for."""
    read: int = 0
    """Tokens of the text, drafts included, that the draft model's cache holds."""
    is_drafting: bool = False
    """Whether the draft model is at work for the next step."""
    bias: LogitBias | None = None

    @property
    def drafts(self) -> list[int]:
        return self.request.drafter.drafts

    @property
    def wants(self) -> int:
        """What the row asks of its next step, as bits."""
        wants_logprobs = self.request.sampling.logprobs is not None
        return WANTS_LOGPROBS * wants_logprobs | IS_BIASED * (self.bias is not None)

    def unread(self) -> list[int]:
        """What the draft model has not read yet; never empty."""
        return [
            *self.request.text_from(self.read),
            *self.drafts[max(0, self.read - self.position - 1) :],
        ]


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
        verify: Verify = "faster",
        draft_limit: float = 0,
    ) -> None:
        """A session without requests.

        Args:
          spec: the cache's. slots: B. vocab_size: V.
          max_tokens: text length at which a request ends with ``length``; None if there is none.
          watchdog_s: longest wait for a step's masks.
          wants_pause: asked after each step whether the engine has something to do.
          verify: when drafts are verified.
          draft_limit: text length up to which a draft model drafts; 0 if there is none.
        """
        self.handle = next(_handles)
        self.broken = False
        """A fill did not come back: the session must be replaced, its thread still holds matchers."""
        self.program: Program = "narrow"
        """The loop that the last ``inputs`` are for."""
        self._spec, self._max_tokens = spec, max_tokens
        self._vocab_size = vocab_size
        self._watchdog_s, self._wants_pause = watchdog_s, wants_pause
        self._rows: list[_Row | None] = [None] * slots
        self._ended: list[Ended] = []
        self._batch = batch = GuidedBatch(slots, spec.max_drafts, vocab_size)
        self._widths = Widths(verify)
        self._draft_limit = draft_limit
        # One token wide, and N; the worker fills those of the program.
        shapes = {n: (slots, n, batch.mask_shape[2]) for n in (1, spec.queries)}
        arrays = {
            n: (np.full(s, -1, np.int32), np.zeros(s[:2], np.int32)) for n, s in shapes.items()
        }
        self._arrays, self._width = arrays, (width := [1])
        self._worker = _FillWorker(lambda: batch.fill(*arrays[width[0]]))
        self._is_filling = False
        self._step_began: float | None = None
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
        position = len(request.prompt) - 1
        bias = LogitBias.of(request.sampling, self._vocab_size)
        row = _Row(request, position, last=request.prompt[-1], read=position, bias=bias)
        self._batch.admit(
            slot,
            matcher,
            force=request.drafter.jump == "force",
            stop_token_ids=request.stop_token_ids,
        )
        try:
            self._propose(slot, row)
        except BaseException:
            self._batch.release(slot)
            raise
        self._rows[slot] = row

    def inputs(self) -> np.ndarray:
        """Inputs of the next step (the format that ``submit`` returns), and start filling for it.

        They are for the loop that ``program`` then names.
        """
        self.program = self._choose_program(None)
        self._width[0] = 1 if self.program == "narrow" else self._spec.queries
        self._step_began = None  # the first step's time would hold the start of the loop
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
            the LM head were read for them, and log-probabilities (see ``step.top_logprobs``). N is
            that of the running loop.

        Returns:
          int32 ``[B, N+4]``: N input tokens, the number of drafts among them, whether the row is
          active, what it asks for (``WANTS_LOGPROBS``, ``IS_BIASED``), and (the same in all rows) what is
          next: ``STOP``, ``VERIFY``, or a pass of the draft model, see ``submit_draft``.
        """
        n = self._width[0]
        now = time.perf_counter()
        if self._step_began is not None:
            self._widths.observe_step(self.program, now - self._step_began)
        self._step_began = now
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
        goes_on = self.any_active and not pauses
        return self._answer(go=goes_on and self._choose_program(self.program) == self.program)

    def submit_draft(self, sampled: np.ndarray) -> np.ndarray:
        """Take a pass of the draft model, int32 ``[B,1]``, and return what is next. Never raises.

        Returns:
          int32 ``[B, N+4]``. While the draft model goes on: tokens that it has not read, how many they
          are beyond one, whether the row drafts, the position of the first, and ``READ_ONE`` or
          ``READ_MANY``. Then the inputs of the step, as ``submit`` returns them.
        """
        for slot, row in enumerate(self._rows):
            if row is None or not row.is_drafting:
                continue
            try:
                unread = row.unread()
                row.read += min(len(unread), self._width[0])
                if len(unread) > self._width[0]:
                    continue  # its last token is yet to be read
                drafter = row.request.drafter
                drafter.add_from_model(self._batch, slot, int(sampled[slot, 0]), row.room)
                row.is_drafting = drafter.wants_model(row.room)
            except BaseException as error:
                self._finish(slot, row, error=_as_exception(error))
        return self._next_pass()

    def collect(self) -> np.ndarray:
        """Masks of the step and, as a last word, whether they are enabled: int32 ``[B,N,W+1]``.

        Never raises.
        """
        masks, enabled = self._filled()
        # One array for one transfer; and a copy, which the next fill cannot change under the reader.
        return np.concatenate([masks, enabled[:, :, None]], axis=2)

    def collect_for_draft(self) -> np.ndarray:
        """The mask after each row's drafts so far, as in ``collect``: int32 ``[B,1,W+1]``."""
        masks, enabled = self._filled()
        rows = np.arange(len(self._rows))
        ends = [len(row.drafts) if row is not None else 0 for row in self._rows]
        return np.concatenate([masks[rows, ends], enabled[rows, ends, None]], axis=1)[:, None]

    def collect_bias(self) -> np.ndarray:
        """What to add to the step's logits, float32 ``[B,V+N-1]``, see ``LogitBias.fill``. Never raises.

        Rows without bias are zeros.
        """
        n = self._width[0]
        # A new one: the runtime may read it in place, and later.
        bias = np.zeros((len(self._rows), self._vocab_size + n - 1), np.float32)
        for slot, row in enumerate(self._rows):
            if row is not None and row.bias is not None:
                row.bias.fill(bias[slot], row.drafts)
        return bias

    # Helpers ------------------------------------------------------------------------------------

    def _advance(self, slot: int, row: _Row, sampled: list[int], logprobs: np.ndarray) -> None:
        """Account for what the device says a row produced; ``logprobs`` has a line for each token."""
        request = row.request
        request.forwards += 1
        if request.cancellation is not None:
            raise request.cancellation
        emitted, reason = self._cut(request, sampled)
        # Text first: a stop text ends the output before whatever was verified behind it.
        texts = request.read([t for t in emitted if t not in request.stop_token_ids])
        if request.text_stream.stopped:
            emitted, reason = emitted[: len(texts)], "stop"
        trace = self._trace(slot, row, sampled[: len(emitted)]) if request.wants_trace else ()
        # What was verified behind the end never happened.
        for source, tried in request.drafter.observe(min(len(sampled) - 1, len(emitted))).items():
            self._widths.observe_drafts(source, tried)
        accepted = self._batch.advance(slot, emitted)
        request.fill_seconds = self._batch.counters(slot).fill_seconds
        counted = [t for t in emitted[:accepted] if t not in request.stop_token_ids]
        request.emit(counted, texts[: len(counted)], logprobs, trace[: len(counted)])
        if row.bias is not None:
            row.bias.count(counted)
        failure = self._batch.failure(slot)
        if failure is not None:
            raise failure
        row.position += len(emitted)
        if reason is None and self._max_tokens is not None and row.position >= self._max_tokens:
            reason = "length"
        if reason is not None:
            self._finish(slot, row, reason)
            return
        row.last = emitted[-1]
        row.read = min(row.read, row.position)  # the draft model forgets what was refused, too
        self._propose(slot, row)

    def _trace(self, slot: int, row: _Row, emitted: list[int]) -> tuple[TokenTrace, ...]:
        """How a step's tokens came to be; the masks are those that it has used."""
        request, (masks, enabled) = row.request, self._arrays[self._width[0]]
        labels = request.drafter.labels
        trace = []
        for index, token in enumerate(emitted):
            is_draft = row.drafts[index : index + 1] == [token]
            legal = _count_legal(masks[slot, index], self._vocab_size)
            trace.append(
                TokenTrace(
                    token,
                    request.text_stream.alone(token),
                    legal if enabled[slot, index] else None,
                    labels[index] if is_draft else "sampled",
                )
            )
        return tuple(trace)

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
        request = row.request
        room = self._spec.room_for_drafts(row.position)
        room = min(room, request.sampling.max_tokens - len(request.tokens) - 1)
        if self._max_tokens is not None:
            room = min(room, self._max_tokens - 1 - row.position)
        row.room = max(room, 0)
        request.drafter.propose(self._batch, slot, request.tokens, row.room)
        row.is_drafting = self._room_for_model(row) > 0

    def _room_for_model(self, row: _Row) -> int:
        """How many tokens the draft model may add to the next step's drafts."""
        fits = row.position + row.room < self._draft_limit
        return (
            row.room - len(row.drafts) if fits and row.request.drafter.wants_model(row.room) else 0
        )

    def _choose_program(self, present: Program | None) -> Program:
        rows = [row for row in self._rows if row is not None]
        proposals = [row.request.drafter.labels for row in rows]
        return self._widths.choose(present, proposals, [self._room_for_model(row) for row in rows])

    def _finish(
        self,
        slot: int,
        row: _Row,
        reason: FinishReason = "error",
        error: Exception | None = None,
    ) -> None:
        self._rows[slot] = None
        self._batch.release(slot)
        row.request.evicted_tokens = _evicted_tokens(self._spec, row)
        if row.request.wants_report and error is None:
            row.request.ended = time.perf_counter()  # the report takes no part of its time
            self._ended.append(Ended(slot, row.request, row.position, reason))
        else:
            row.request.finish(reason, error)

    def _answer(self, *, go: bool) -> np.ndarray:
        """The answer to a step."""
        if not go:
            return self._blank(STOP)
        if self.program == "narrow":  # what does not pay is not verified
            for slot, row in enumerate(self._rows):
                if row is not None and row.drafts:
                    row.request.drafter.drop(self._batch, slot)
        if self.program == "drafting":
            return self._next_pass()
        return self._step_inputs()

    def _next_pass(self) -> np.ndarray:
        """The draft model's next pass; the step, where no row drafts any more."""
        n = self._width[0]
        drafting = {
            slot: row for slot, row in enumerate(self._rows) if row is not None and row.is_drafting
        }
        if not drafting:
            return self._step_inputs()
        unread = {slot: row.unread()[:n] for slot, row in drafting.items()}
        longest = max(map(len, unread.values()))
        answer = self._blank(READ_ONE if longest == 1 else READ_MANY)
        for slot, tokens in unread.items():
            answer[slot, : len(tokens)] = tokens
            answer[slot, n : n + 3] = len(tokens) - 1, 1, drafting[slot].read
        self._start_filling()
        return answer

    def _step_inputs(self) -> np.ndarray:
        n = self._width[0]
        answer = self._blank(VERIFY)
        for slot, row in enumerate(self._rows):
            if row is not None:
                drafts = row.drafts
                answer[slot, 0] = row.last
                answer[slot, 1 : 1 + len(drafts)] = drafts
                answer[slot, n : n + 3] = len(drafts), 1, row.wants
        self._start_filling()
        return answer

    def _blank(self, state: int) -> np.ndarray:
        answer = np.zeros((len(self._rows), self._width[0] + 4), np.int32)
        answer[:, -1] = state
        return answer

    def _start_filling(self) -> None:
        if self.broken:  # nobody to do it; the step that ends the loop needs no masks
            return
        self._is_filling = True
        self._worker.start()

    def _filled(self) -> tuple[np.ndarray, np.ndarray]:
        """Masks and whether they are enabled, once the worker has filled them."""
        masks, enabled = self._arrays[self._width[0]]
        if self._is_filling and not self._worker.wait(self._watchdog_s):
            self.broken = True
            error = GrammarTimeout(
                f"the grammar's masks were not ready after {self._watchdog_s:g} s"
            )
            for slot, row in enumerate(self._rows):
                if row is not None:
                    # Not through the batch: the stuck thread may still be at work in it.
                    row.request.finish("error", error)
                    self._rows[slot] = None
        self._is_filling = False
        if self.broken:
            enabled = np.zeros_like(enabled)  # whatever is sampled goes nowhere
        return masks, enabled


def _evicted_tokens(spec: CacheSpec, row: _Row) -> int:
    """Tokens of a row's text that its cache holds no more, as ``CacheReport`` finds them."""
    if spec.max_tokens is not None:
        return 0
    prompt = len(row.request.prompt) - 1
    chosen = prompt if spec.selects(prompt) else 0  # where the last choice fell
    places = spec.kept
    if spec.evictor is None:
        places = min(places, max(0, chosen - spec.sinks - spec.window + 1))
        chosen = row.position
    chosen = max(chosen, row.position - row.position % spec.interval)
    return max(0, chosen - spec.sinks - spec.window + 1 - places)


def _count_legal(words: np.ndarray, vocab_size: int) -> int:
    """Tokens that a mask row allows, int32 ``[W]``; bits beyond the vocabulary do not count."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size)
    return int(np.count_nonzero(bits))


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


def collect_bias(handle: jax.Array, tokens: jax.Array, vocab_size: int) -> jax.Array:
    """``Session.collect_bias`` for the step of these tokens, int32 ``[B,N]``: ``[B,V+N-1]`` float32."""
    batch, n = tokens.shape
    out = jax.ShapeDtypeStruct((batch, vocab_size + n - 1), jnp.float32)
    return io_callback(_collect_bias, out, handle, tokens[0, 0])


def submit_draft(handle: jax.Array, sampled: jax.Array, n: int) -> jax.Array:
    """``Session.submit_draft`` of ``[B,1]`` tokens, while a step has ``n``: to ``[B,N+4]``, int32."""
    out = jax.ShapeDtypeStruct((sampled.shape[0], n + 4), jnp.int32)
    return io_callback(_submit_draft, out, handle, sampled)


def collect_for_draft(handle: jax.Array, after: jax.Array, vocab_size: int) -> jax.Array:
    """``Session.collect_for_draft`` once ``after [B,...]`` is computed: ``[B,1,W+1]`` int32."""
    out = jax.ShapeDtypeStruct((after.shape[0], 1, -(-vocab_size // 32) + 1), jnp.int32)
    return io_callback(_collect_for_draft, out, handle, after.reshape(-1)[0])


def _submit(handle: jax.Array, sampled: jax.Array) -> np.ndarray:
    return _session(handle).submit(np.asarray(sampled))


def _collect(handle: jax.Array, ready: jax.Array) -> np.ndarray:
    return _session(handle).collect()


def _collect_bias(handle: jax.Array, ready: jax.Array) -> np.ndarray:
    return _session(handle).collect_bias()


def _submit_draft(handle: jax.Array, sampled: jax.Array) -> np.ndarray:
    return _session(handle).submit_draft(np.asarray(sampled))


def _collect_for_draft(handle: jax.Array, ready: jax.Array) -> np.ndarray:
    return _session(handle).collect_for_draft()


def _session(handle: jax.Array) -> Session:
    return _sessions[int(np.asarray(handle))]
