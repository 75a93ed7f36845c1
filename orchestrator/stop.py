"""When a job is to end before its own end: Ctrl-C, SIGTERM (`ray job stop`), `planaria stop`, or its time is up."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from orchestrator.lease import LeaseLost
from orchestrator.runfolder import RunFolder

_LOOK_EVERY_S = 1.0


class StopRequest:
    """Collects requests to stop; the controller looks at it between steps.

    The first Ctrl-C or SIGTERM asks for a checkpoint and an end, the second one ends at once (KeyboardInterrupt).
    """

    def __init__(self, folder: RunFolder, max_time_s: float | None) -> None:
        self._folder, self._max_time_s = folder, max_time_s
        self._started = time.monotonic()
        self._next_look = 0.0
        self._lost: str | None = None
        self.reason: str | None = None

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def check(self) -> bool:
        """Look at the clock and, every second, at the run's folder. Raises LeaseLost when another driver has it."""
        if self._lost is not None:
            raise LeaseLost(self._lost)
        now = time.monotonic()
        if self._max_time_s is not None and now - self._started >= self._max_time_s:
            self.reason = self.reason or "training.max_time_s is over"
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            with contextlib.suppress(OSError):  # storage that is away for a while: asked again in a second
                if self._folder.stop_requested():
                    self.reason = self.reason or "planaria stop"
        return self.requested

    def lost(self, sentence: str) -> None:
        """Another driver has the run: this one must end without writing anything more."""
        self._lost = sentence

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Turn signals into requests inside the block (only a process's main thread can)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
