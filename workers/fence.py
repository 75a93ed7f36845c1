"""The switch that gets everybody out: one per generation, tripped by whoever first learns that a peer is gone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class Fenced(RuntimeError):
    """The generation is over; the text says why. The process is healthy and may join the next one.

    Code in between may wrap it (pipeline schedules raise RuntimeError): what decides is ``Fence.tripped``.
    """


class Fence:
    """Ends every wait of one generation, from any thread, when it next looks (50 ms) or sooner. It stays tripped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cause: str | None = None
        self.tripped_at: float | None = None  # time of day
        self._waiters: set[threading.Event] = set()
        self._actions: list[Callable[[], None]] = []

    @property
    def tripped(self) -> bool:
        return self._cause is not None

    @property
    def cause(self) -> str:
        """Why it tripped (the first cause given); empty before."""
        return self._cause or ""

    def trip(self, cause: str | BaseException) -> bool:
        """Set the flag, wake all waiters, then run the actions. False if it had tripped before."""
        with self._lock:
            if self._cause is not None:
                return False
            self.tripped_at = time.time()
            self._cause = str(cause) or repr(cause)
            waiters, actions = list(self._waiters), list(self._actions)
        for event in waiters:
            event.set()
        for action in actions:
            action()
        return True

    def check(self) -> None:
        """Raise ``Fenced`` if the fence has tripped."""
        if self._cause is not None:
            raise Fenced(self._cause)

    def on_trip(self, action: Callable[[], None]) -> None:
        """Have ``action`` run by the thread that trips the fence; at once if it has tripped already."""
        with self._lock:
            if self._cause is None:
                self._actions.append(action)
                return
        action()

    @contextlib.contextmanager
    def waking(self, event: threading.Event) -> Iterator[None]:
        """While inside, a trip also sets ``event``. The waiter then tells the two reasons apart by itself."""
        with self._lock:
            self._waiters.add(event)
            if self._cause is not None:
                event.set()
        try:
            yield
        finally:
            with self._lock:
                self._waiters.discard(event)
