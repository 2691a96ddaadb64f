"""Where a server is between its start and its end."""

from typing import Literal

State = Literal["starting", "ready", "draining"]


class Lifecycle:
    """The state of one server. It only ever moves forward; any thread may read it."""

    def __init__(self) -> None:
        """A server that starts."""
        self._state: State = "starting"

    @property
    def state(self) -> State:
        """``ready`` takes requests; ``starting`` and ``draining`` take none."""
        return self._state

    @property
    def is_ready(self) -> bool:
        """Whether requests should be sent here."""
        return self._state == "ready"

    def serve(self) -> None:
        """From now on requests are taken, unless the server was told to end meanwhile."""
        if self._state == "starting":
            self._state = "ready"

    def drain(self) -> None:
        """From now on no more requests are taken."""
        self._state = "draining"
