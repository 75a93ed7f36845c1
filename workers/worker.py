"""The worker process: warm before it is needed, responsive while it trains.

Methods are called from several threads of a Ray actor: ``run`` blocks in one of them (the training thread), the others
answer beside it. Whatever happens to a generation, the process, its imports and its sockets live on.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

from checkpointing.schema import Schema
from workers.device import Device
from workers.kept import Kept
from workers.models.spec import describe
from workers.plan import Order, Outcome
from workers.program import Program
from workers.run import Control, play
from workers.warm_up import warm_up


class Worker:
    """One device of one node. ``run(order)`` plays a rank; before and between orders it is a warm standby."""

    def __init__(self, device_index: int, num_threads: int) -> None:
        # Only token_loss takes what a model returns, and out of place; FSDP2 warns whoever might do otherwise.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._device = Device.choose(device_index, num_threads)
        self._lock = threading.Lock()
        self._fenced_below = 0
        self._control: Control | None = None
        self._kept = Kept()

    def warm_up(self) -> dict[str, Any]:
        """Load what the first step would load, then say who this is: pid and device kind."""
        self._device.use()
        warm_up(self._device.torch)
        gc.collect()
        gc.freeze()  # what is imported stays: later collections need not look at it
        return {"pid": os.getpid(), "device": self._device.kind}

    def describe(self, program: Program) -> Schema:
        """The schema of ``program``'s training state; raises ValueError for a model that cannot be built."""
        return describe(program)

    def run(self, order: Order) -> Outcome:
        """Play ``order`` until its generation ends; refuses a generation that has been fenced already."""
        with self._lock:
            if order.generation <= self._fenced_below:
                return Outcome("fenced", order.step, f"generation {order.generation} was fenced before it began")
            assert self._control is None or self._control.done.is_set(), "the previous generation still runs"
            control = self._control = Control(order.generation)
        try:
            with _output_to(order.log):
                return play(order, self._device, control, self._kept)
        finally:
            gc.collect()  # what an interrupted step has left is full of reference cycles
            control.finish()

    def rest(self) -> None:
        """This worker plays no rank in the next generation: let go of the memory of the last one."""
        with self._lock:
            if self._control is None or self._control.done.is_set():
                self._kept.release()

    def fence(self, generation: int, cause: str) -> float:
        """End ``generation`` and all older ones here; returns at once with the time of day. Safe to call twice."""
        with self._lock:
            self._fenced_below = max(self._fenced_below, generation)
            control = self._control
        if control is not None and control.generation <= generation:
            control.fence.trip(cause)
        return time.time()

    def quiesced(self, generation: int, timeout_s: float) -> list[dict[str, Any]] | None:
        """Wait until the training thread is idle; its last reports of ``generation``, or None when it is not in time.

        A fence may overtake an order: then there are reports of an earlier generation only, which are old news.
        """
        control = self._control
        if control is None:
            return []
        if not control.done.wait(timeout_s):
            return None
        return control.reports(0, 0) if control.generation == generation else []

    def stop_after_step(self) -> None:
        """Ask for a stop at the next vote: every member ends after the same step."""
        if self._control is not None:
            self._control.stop.set()

    def reports(self, generation: int, after: int, timeout_s: float) -> list[dict[str, Any]]:
        """Long poll: what this worker reported in ``generation`` after number ``after``."""
        control = self._control
        if control is None or control.generation != generation:
            time.sleep(0.01)  # the order is still on its way; the caller polls again
            return []
        return control.reports(after, timeout_s)

    def use_readers(self, readers: tuple[Any, ...]) -> None:
        """Read from these from now on."""
        if self._control is not None and self._control.client is not None:
            self._control.client.replace(readers)


@contextlib.contextmanager
def _output_to(path: str) -> Iterator[None]:
    """Inside the block, what this process prints (also from C++) is appended to the file ``path``."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    before = [os.dup(number) for number in (1, 2)]
    try:
        for number in (1, 2):
            os.dup2(log, number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, saved in zip((1, 2), before, strict=True):
            os.dup2(saved, number)
        for number in (log, *before):
            os.close(number)
