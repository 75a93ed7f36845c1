"""Threads for calls that may never return."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Callers:
    """Daemon threads for calls that may never return. Grows only when all are busy; an idle one is used again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_idle = 0
        self._closed = False

    def submit(self, call: Callable[[], None]) -> None:
        with self._lock:
            if self._num_idle:
                self._num_idle -= 1
            else:
                threading.Thread(target=self._serve, name="caller", daemon=True).start()
            self._calls.put(call)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # an idle thread must not keep the last call's tensors
            with self._lock:
                if self._closed:
                    return
                self._num_idle += 1

    def close(self) -> None:
        """End the idle threads now and each busy one after its call."""
        with self._lock:
            self._closed = True
            for _ in range(self._num_idle):
                self._calls.put(None)
            self._num_idle = 0
