"""What the engine thread has to turn to: requests that wait, and the one whose prompt is being read."""

import collections
import dataclasses
import threading
import time
from collections.abc import Iterator

from gkv_jax.errors import EngineClosedError, EngineFailedError, UserError
from gkv_jax.request import Request


@dataclasses.dataclass
class Reading:
    """A request whose prompt is being read into the row of its slot.

    Attributes:
      slot: free for the session until the request is seated there.
      request: not cancelled when it was last looked at.
      calls: reads on up to the next call of the device.
      size: tokens that this next call computes.
    """

    slot: int
    request: Request
    calls: Iterator[int]
    size: int = 0


class Inbox:
    """What the engine thread has to turn to. The loop's callbacks look at it, lock-free.

    Other threads write ``waiting``, ``closing`` and ``reload``; the engine thread the rest.
    """

    def __init__(self) -> None:
        """Open and empty."""
        self.waiting: collections.deque[Request] = collections.deque()
        self.closing = False
        self.reload = False
        self.wake = threading.Event()
        self.reading: Reading | None = None
        self.next_turn = 0.0
        """``time.perf_counter`` at which prompts are read on."""
        self.failure: BaseException | None = None
        """What ended the engine thread, if it was not told to end."""
        self._is_open = True
        self._lock = threading.Lock()  # between put and drain only, never held during a wait

    @property
    def closed(self) -> bool:
        """Whether requests are refused from now on."""
        return self.closing or self.failure is not None or not self._is_open

    def put(self, request: Request) -> None:
        """Let a request wait for a slot. ``Request.submitted`` says from when on; if refused, it does not.

        Raises:
          EngineClosedError: nobody will serve it.
          UserError: it was put here before.
        """
        with self._lock:
            if not self._is_open:
                raise self.refusal()
            if request.submitted:
                raise UserError("request was submitted before; prepare a new one")
            request.submitted = time.perf_counter()
            self.waiting.append(request)
        self.wake.set()

    def drain(self) -> None:
        """Take no more requests, and end those that wait."""
        with self._lock:
            self._is_open = False
        while self.waiting:
            self.waiting.popleft().finish("error", self.refusal())

    def refusal(self) -> EngineClosedError:
        """Why no request is served any more."""
        if self.failure is None:
            return EngineClosedError("the engine was closed; make a new one")
        error = EngineFailedError(
            f"the engine has failed ({type(self.failure).__name__}: {self.failure}); make a new one"
        )
        error.__cause__ = self.failure
        return error

    def wants_attention(self, slot_is_free: bool) -> bool:
        """Whether the loop should pause for the engine thread."""
        if self.closing or self.reload:
            return True
        reading = self.reading
        if reading is not None and reading.request.cancelled:
            return True
        # A copy: other threads append while this one looks.
        if self.waiting and any(r.cancelled for r in list(self.waiting)):
            return True
        has_turn = reading is not None or (bool(self.waiting) and slot_is_free)
        return has_turn and time.perf_counter() >= self.next_turn
