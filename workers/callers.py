"""Threads for calls that may never return."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class Callers:
    """Runs each call in a daemon thread. A new thread starts only when all are busy; an idle one is used again."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_idle = 0
        self._num_threads = 0
        self._closed = False

    @property
    def num_busy(self) -> int:
        with self._changed:
            return self._num_threads - self._num_idle

    def submit(self, call: Callable[[], None]) -> None:
        with self._changed:
            assert not self._closed
            if self._num_idle:
                self._num_idle -= 1
            else:
                self._num_threads += 1
                threading.Thread(target=self._serve, name="caller", daemon=True).start()
            self._calls.put(call)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # an idle thread must not keep the last call's tensors
            with self._changed:
                if self._closed:
                    break
                self._num_idle += 1
        with self._changed:
            self._num_threads -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more calls; end the idle threads now and each busy one after its call."""
        with self._changed:
            self._closed = True
            for _ in range(self._num_idle):
                self._calls.put(None)
            self._num_idle = 0

    def join(self, deadline: float) -> None:
        """After ``close``: wait until all threads have ended, at the latest at ``deadline`` (monotonic seconds)."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_threads, max(0.0, deadline - time.monotonic()))
