"""The scheduler: the engine thread, what it owns on the device, and who is served when."""

import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Literal

import jax
import numpy as np

from gkv_jax.bridge import Session
from gkv_jax.cache import Cache, CacheSpec, cache_dtype, init_cache, longest_text, reset_row
from gkv_jax.cache.report import report as report_of
from gkv_jax.decode import device_loop, drafting_loop, host_loop
from gkv_jax.draft_model import Drafting
from gkv_jax.drafts.widths import Verify
from gkv_jax.errors import UserError
from gkv_jax.inbox import Inbox, Reading
from gkv_jax.models.protocol import Decoder, Params
from gkv_jax.placement import Surroundings, has_deleted, settle, settle_beside, settle_like
from gkv_jax.prefill import reading
from gkv_jax.prefix import PrefixStore
from gkv_jax.request import Request
from gkv_jax.sampling import greedy_rows, set_row
from gkv_jax.step import Head

logger = logging.getLogger("gkv_jax")

Loop = Literal["device", "host"]

LONGEST_TURN_S = 1.0
"""The longest turn of the decode loop while prompts wait. A call that had to compile first took longer."""


class Scheduler:
    """Serves requests from an inbox, in a thread that alone uses the cache, session and sampling rows.

    Requests get free slots in the order in which they came, and their prompts are read chunk by chunk.
    While others decode, reading and decoding take turns (see ``_read_on``).

    Attributes:
      model, spec, slots, loop, head, drafting: as in ``Engine``; ``drafting`` is its draft model at work.
      inbox: any thread may put requests there.
      sampling: how each slot's row is sampled.
      surroundings: of the thread that made this; the engine thread's, too.
    """

    def __init__(
        self,
        model: Decoder,
        params: Params,
        spec: CacheSpec,
        *,
        slots: int,
        loop: Loop,
        head: Head,
        drafting: Drafting | None,
        verify: Verify,
        watchdog_s: float,
    ) -> None:
        """Make the cache, and start the thread."""
        self.model, self.spec, self.slots, self.loop, self.head = model, spec, slots, loop, head
        self.drafting = drafting
        self._verify, self._watchdog_s = verify, watchdog_s
        # One attribute, so that no thread ever sees prefixes that other weights have read.
        self._weights = settle(params), PrefixStore(spec, model)
        self._cache = self._new_cache()
        self.inbox = Inbox()
        self._session = self._new_session()
        self.sampling = greedy_rows(slots)
        # The thread holds the scheduler only while there is work, so that an engine nobody uses any
        # more is freed with its weights; the finaliser also runs when the interpreter ends.
        self.surroundings = Surroundings()
        thread = threading.Thread(
            target=_serve,
            args=(weakref.ref(self), self.inbox, self.surroundings),
            name="gkv-engine",
            daemon=True,
        )
        thread.start()
        self._finalizer = weakref.finalize(self, _stop, self.inbox, thread)

    @property
    def params(self) -> Params:
        """The weights of the next loop run."""
        return self._weights[0]

    @property
    def prefixes(self) -> PrefixStore:
        """What these weights have read for several prompts."""
        return self._weights[1]

    @property
    def active(self) -> int:
        """Slots that are taken, by requests that decode or whose prompts are being read."""
        return self.slots - len(self._free_slots())

    @property
    def cache_bytes(self) -> int:
        """Of the caches as they are now, the draft model's included."""
        beside = 0 if self.drafting is None else self.drafting.cache.nbytes
        return self._cache.nbytes + beside

    def cache_shapes(self) -> Cache:
        """The cache's tree, with shapes and dtypes in place of arrays."""

        def shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
            sharding = leaf.sharding if leaf.committed else None
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(shape, self._cache)

    def use(self, params: Params) -> None:
        """Decode with other weights of the same shapes and dtypes from the next loop run on."""
        self._weights = settle_like(params, self.params), PrefixStore(self.spec, self.model)
        self.inbox.reload = True

    def close(self) -> None:
        """End what is running and wait for the thread's end."""
        self._finalizer()

    # The engine thread ----------------------------------------------------------------------------

    def work(self) -> None:
        """Serve until nothing is left to do."""
        inbox = self.inbox
        while not inbox.closing and (
            inbox.waiting or inbox.reading is not None or self._session.any_active
        ):
            try:
                self._drop_cancelled()
                self._read_on()
                if self._session.any_active:
                    self._run()
            except Exception as error:
                # The device program failed. What was running is lost, and the cache with it.
                self._end_all(error)
                for leaf in jax.tree.leaves(self._cache):
                    leaf.delete()  # first, or there may be no room for the new one
                self._session, self._cache = self._new_session(), self._new_cache()
                if self.drafting is not None:
                    self.drafting.clear()
        if inbox.closing:
            self._end_all(inbox.refusal())

    def fail(self, failure: BaseException) -> None:
        """The thread ends with ``failure``: end what is running, too."""
        logger.critical("the engine has failed and takes no more requests", exc_info=failure)
        self.inbox.failure = failure
        # It would keep the failure, whose traceback keeps this scheduler, until the interpreter ends.
        self._finalizer.detach()
        self._end_all(self.inbox.refusal())

    @contextlib.contextmanager
    def _explaining(self, params: Params) -> Iterator[None]:
        """What lies behind an error, if these weights are gone. New ones are then all that it takes.

        The engine's own may be others by now.
        """
        try:
            yield
        except Exception as error:
            gone = "params" if has_deleted(params) else None
            if self.drafting is not None and has_deleted(self.drafting.params):
                gone = "draft.params"
            if gone is None:
                raise
            raise UserError(
                f"{gone} of the engine have been deleted, as by a training step that donates them "
                "(donate_argnums); call engine.update_params with the new ones after every such step, "
                "before the next request, or give the engine a copy"
            ) from error

    def _end_all(self, error: Exception) -> None:
        """End what is being read and what decodes, and the session with it."""
        if (reading := self.inbox.reading) is not None:
            self.inbox.reading = None
            reading.request.finish("error", error)
        self._session.fail_all(error)
        self._session.close()

    def _run(self) -> None:
        """Decode until the session wants something else."""
        self.inbox.reload = False
        session, params = self._session, self.params
        with self._explaining(params):
            if self.loop == "host":
                self._cache = host_loop(
                    params,
                    self._cache,
                    session,
                    self.sampling,
                    model=self.model,
                    spec=self.spec,
                    head=self.head,
                    drafting=self.drafting,
                )
            else:
                self._run_on_device(session, params)
        self._report_ended()
        if session.broken:
            session.close()
            self._session = self._new_session()

    def _run_on_device(self, session: Session, params: Params) -> None:
        answer, positions = session.inputs(), session.positions()
        handle = np.int32(session.handle)
        if session.program != "drafting":
            self._cache = device_loop(
                params,
                self._cache,
                answer,
                positions,
                self.sampling,
                handle,
                model=self.model,
                spec=self.spec,
                head=self.head,
            )
        else:
            drafting = self.drafting
            assert drafting is not None
            self._cache, drafting.cache = drafting_loop(
                params,
                self._cache,
                drafting.params,
                drafting.cache,
                answer,
                positions,
                self.sampling,
                drafting.target_ids,
                handle,
                model=self.model,
                spec=self.spec,
                draft_model=drafting.model,
                draft_spec=drafting.spec,
                head=self.head,
            )
        jax.block_until_ready(self._cache)

    def _report_ended(self) -> None:
        """Read the rows of requests that want a report, before others are seated there."""
        for ended in self._session.take_ended():
            try:
                ended.request.report = report_of(
                    self._cache, ended.slot, ended.position, spec=self.spec, model=self.model
                )
            except Exception as error:  # of this request alone
                ended.request.finish("error", error)
            else:
                ended.request.finish(ended.reason)

    def _drop_cancelled(self) -> None:
        """End what was cancelled before it decoded."""
        inbox = self.inbox
        for request in [r for r in list(inbox.waiting) if r.cancelled]:
            inbox.waiting.remove(request)
            request.finish("error", request.cancellation)
        if inbox.reading is not None and inbox.reading.request.cancelled:
            request, inbox.reading = inbox.reading.request, None
            request.finish("error", request.cancellation)

    def _read_on(self) -> None:
        """Read waiting prompts: all of them while nobody decodes, else for one turn.

        A turn reads as many tokens as a chunk has, short prompts together or a part of a long one, and
        one call of the device at least. Then it is the turn of the decode loop: for as long (but not
        longer than ``LONGEST_TURN_S``), or for less where more requests are to be read into slots than
        decode in them, in proportion.
        """
        inbox, session = self.inbox, self._session
        if session.any_active and time.perf_counter() < inbox.next_turn:
            return
        began, room, has_read = time.perf_counter(), self.spec.longest_chunk, False
        while not inbox.closing and (reading := self._present_reading()) is not None:
            if session.any_active and has_read and reading.size > room:
                break
            room, has_read = room - reading.size, True
            self._go_on(reading)
            self._drop_cancelled()
        if has_read:
            now, free = time.perf_counter(), len(session.free_slots)
            to_read = min(free, len(inbox.waiting) + (inbox.reading is not None))
            share = min(1.0, (self.slots - free) / max(to_read, 1))
            inbox.next_turn = now + min(share * (now - began), LONGEST_TURN_S)

    def _present_reading(self) -> Reading | None:
        """What is being read: if nothing, the first of those that wait, where a slot is free for it."""
        inbox = self.inbox
        while inbox.reading is None and inbox.waiting and (free := self._free_slots()):
            request = inbox.waiting[0]
            request.admitted = time.perf_counter()
            inbox.reading = Reading(free[0], request, self._reads(free[0], request))
            inbox.waiting.popleft()
            self._go_on(inbox.reading)  # to its first call, or to its end if it needs none
        return inbox.reading

    def _go_on(self, reading: Reading) -> None:
        """Read a prompt up to the next call of the device, or to its end."""
        try:
            reading.size = next(reading.calls)
        except StopIteration:
            self.inbox.reading = None
        except Exception as error:  # of this request alone, unless it took the cache with it
            self.inbox.reading = None
            reading.request.finish("error", error)
            caches = self._cache, self.drafting and self.drafting.cache
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(caches)):
                raise
            jax.block_until_ready(caches)

    def _reads(self, slot: int, request: Request) -> Iterator[int]:
        """Read a prompt, all but its last token: that one is the first step's input. Then seat it.

        Yields before each call of the device how many tokens it computes. In between, the decode loop
        may run: it writes nothing into the rows of slots without a request.
        """
        spec, model, tokens = self.spec, self.model, request.prompt[:-1]
        params, prefixes = self._weights
        self._cache = reset_row(self._cache, np.int32(slot), spec=spec, model=model)
        self._cache, start = prefixes.begin(self._cache, slot, tokens)
        request.prefix_tokens = start
        with self._explaining(params):
            for call in reading(params, tokens, slot, model=model, spec=spec, start=start):
                yield call.size
                # Kept once it is there: a call that fails leaves a cache that says that it is lost.
                self._cache = jax.block_until_ready(call.run(self._cache))
            if self.drafting is not None and request.drafter.uses_model:
                yield from self.drafting.reads(slot, tokens)
        if request.shares_prefix:
            self._cache = prefixes.add(tokens, self._cache, slot)
        set_row(self.sampling, slot, request.sampling)
        self._session.admit(slot, request)

    def _free_slots(self) -> list[int]:
        reading = self.inbox.reading
        taken = None if reading is None else reading.slot
        return [slot for slot in self._session.free_slots if slot != taken]

    def _new_cache(self) -> Cache:
        cache = init_cache(self.spec, self.model, self.slots, cache_dtype(self.params, self.model))
        return settle_beside(cache, self.params)

    def _new_session(self) -> Session:
        inbox, longest = self.inbox, longest_text(self.spec, self.model)
        session = Session(
            self.spec,
            self.slots,
            self.model.vocab_size,
            max_tokens=None if math.isinf(longest) else int(longest),
            watchdog_s=self._watchdog_s,
            wants_pause=lambda: inbox.wants_attention(bool(session.free_slots)),
            verify=self._verify,
            draft_limit=0 if self.drafting is None else self.drafting.limit,
        )
        return session


def _serve(
    scheduler_ref: "weakref.ref[Scheduler]", inbox: Inbox, surroundings: Surroundings
) -> None:
    """The engine thread. Whatever ends it, no request is left waiting."""
    try:
        while not inbox.closing:
            inbox.wake.wait()
            inbox.wake.clear()
            scheduler = scheduler_ref()
            if scheduler is None:
                return
            try:
                with surroundings.entered():
                    scheduler.work()
            except BaseException as failure:
                scheduler.fail(failure)
                return
            del scheduler
    finally:
        inbox.drain()


def _stop(inbox: Inbox, thread: threading.Thread) -> None:
    inbox.closing = True
    inbox.wake.set()
    if threading.current_thread() is not thread:
        thread.join()
