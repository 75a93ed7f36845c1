"""A cap on bandwidth: writers say how much they are about to write, and wait when that would be too fast."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pacer:
    """Lets ``bytes_per_s`` through on average, for all threads that call it. ``clock`` and ``sleep``: for tests."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def __call__(self, nbytes: int) -> None:
        """Wait until ``nbytes`` may be written; idle time is not saved up."""
        with self._lock:
            now = self._clock()
            begin = max(self._free_at, now)
            self._free_at = begin + nbytes / self._bytes_per_s
        if begin > now:
            self._sleep(begin - now)
