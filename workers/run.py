"""One worker's part in one generation: form the groups, take over the state, train until something ends it."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from typing import Any

import numpy as np
import ray

from checkpointing.arena import Arena
from checkpointing.load import load_state
from pipelines.client import ReaderClient
from workers.device import Device
from workers.engine import Engine
from workers.fenced_group import Fence, Fenced, Generation
from workers.plan import Order, Outcome
from workers.rendezvous import connect
from workers.snapshots import Snapshots, wait_ref

_KEEP_REPORTS = 256


class Control:
    """What reaches the training thread from outside in one generation, and what it tells: fence, stop request, reports."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.fence = Fence()
        self.stop = threading.Event()
        self.done = threading.Event()
        self._reports: deque[dict[str, Any]] = deque(maxlen=_KEEP_REPORTS)
        self._num_reports = 0
        self._changed = threading.Condition()

    def report(self, kind: str, **fields: Any) -> None:
        with self._changed:
            self._num_reports += 1
            self._reports.append({"seq": self._num_reports, "kind": kind, "time": time.time(), **fields})
            self._changed.notify_all()

    def reports(self, after: int, timeout_s: float) -> list[dict[str, Any]]:
        """Reports with ``seq`` > after, waiting up to ``timeout_s`` for the first one."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_reports > after or self.done.is_set(), timeout_s)
            return [report for report in self._reports if report["seq"] > after]

    def finish(self) -> None:
        with self._changed:
            self.done.set()
            self._changed.notify_all()


def play(order: Order, device: Device, control: Control) -> Outcome:
    """Play ``order``'s rank until the generation ends for this worker; never raises for a failure of the job."""
    training = _Training(order, device, control)
    try:
        return training.run()
    except Fenced as error:
        return Outcome("fenced", training.step, str(error), control.fence.tripped_at)
    except Exception as error:
        if control.fence.tripped:
            return Outcome("fenced", training.step, control.fence.cause, control.fence.tripped_at)
        control.fence.trip(f"rank {order.rank} raised {type(error).__name__}: {error}")
        return Outcome("failed", training.step, traceback.format_exc(limit=-8), time.time())
    finally:
        training.close()


class _Training:
    def __init__(self, order: Order, device: Device, control: Control) -> None:
        self.order, self.device, self.control = order, device, control
        self.step, self.cursor, self.tokens = order.step, order.cursor, order.tokens
        self._closers: list[Any] = []

    def run(self) -> Outcome:
        self._regroup()
        self._take_over()
        return self._loop()

    def close(self) -> None:
        for close in reversed(self._closers):
            close()

    def _regroup(self) -> None:
        order, fence = self.order, self.control.fence
        started = time.monotonic()
        store = connect(*order.store, timeout_s=order.detect_bound_s)
        generation = Generation.form(store, order.rank, order.layout.size, fence, self.device, order.detect_bound_s)
        self._closers.append(generation.dissolve)
        self.engine = Engine(order.program, order.layout, order.rank, self.device.torch)
        self.control.report("regrouped", seconds=time.monotonic() - started)

    def _take_over(self) -> None:
        """Fill the model from the survivors' memory (or disk), or start fresh; then protect it under this generation."""
        order, fence = self.order, self.control.fence
        started = time.monotonic()
        self.client = ReaderClient(
            order.readers,
            lambda reader, method, *args: wait_ref(getattr(reader, method).remote(*args), fence),
            (order.layout.data_size, order.layout.data_rank(order.layout.coordinates(order.rank))),
            order.program.training.micro_batch_rows,
        )
        self._closers.append(self.client.close)
        self.client.prefetch(self.cursor)
        self.engine.initialize()
        if order.fetches is not None:
            with _Sources(order, fence) as sources:
                host = self.device.host_arrays(self.engine.local_state())
                load_state(order.fetches, host, sources.open_local, sources.read_remote)
        self.snapshots = Snapshots(order, self.engine, self.device, fence)
        self._closers.append(self.snapshots.close)
        self.snapshots.take(self.step, self._meta({}), durable=False)
        self.control.report("taken_over", seconds=time.monotonic() - started)

    def _loop(self) -> Outcome:
        order, control, training = self.order, self.control, self.order.program.training
        while True:
            started = time.monotonic()
            batch = self.client.next(self.cursor)
            input_s = time.monotonic() - started
            self.engine.forward_backward(batch)
            held_s = self.snapshots.wait_held()
            verdict = self.engine.vote(stop=control.stop.is_set())
            lr = self.engine.apply(verdict, self.step)
            self.step += 1
            self.cursor = batch.next
            self.tokens += batch.num_valid
            finished = self.step == training.max_steps or (
                training.max_tokens is not None and self.tokens >= training.max_tokens
            )
            last = finished or verdict.stop
            durable = bool(order.durable_every) and self.step % order.durable_every == 0
            report = {
                "step": self.step,
                "loss": verdict.loss,
                "tokens": batch.num_valid,
                "total_tokens": self.tokens,
                "grad_norm": verdict.grad_norm,
                "lr": lr,
                "finite": verdict.finite,
                "batch_digest": batch.digest,
                "cursor": self.cursor,
            }
            if training.eval_every and self.step % training.eval_every == 0:
                report["eval_loss"] = self.engine.evaluate(self.client.eval_batch(training.eval_rows))
            stall_s = held_s
            if last or durable or self.step % self._snapshot_every() == 0:
                stall_s += self.snapshots.take(self.step, self._meta(report), durable)
            if last:
                self.snapshots.wait_held()
                self.engine.vote(stop=True)  # all members agree that the last snapshot is held before any of them leaves
            report |= {"step_time_s": time.monotonic() - started, "input_s": input_s, "stall_s": stall_s, "durable": durable}
            control.report("step", **report)
            if last:
                return Outcome("finished" if finished else "paused", self.step)

    def _snapshot_every(self) -> int:
        return self.order.snapshot_every if isinstance(self.order.snapshot_every, int) else 1

    def _meta(self, report: dict[str, Any]) -> dict[str, Any]:
        return {"cursor": self.cursor, "tokens": self.tokens, "report": report}


class _Sources:
    """Opens the holdings that a transfer plan names: arenas of this node by mapping, other nodes through their keepers."""

    def __init__(self, order: Order, fence: Fence) -> None:
        self._order, self._fence = order, fence
        self._arenas: dict[Any, Arena] = {}

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *_: object) -> None:
        for arena in self._arenas.values():
            arena.close()

    def open_local(self, holding: Any) -> np.ndarray:
        key = (holding.snapshot.generation, holding.snapshot.rank, holding.role)
        if key not in self._arenas:
            self._arenas[key] = Arena.attach(wait_ref(self._order.keeper.arena_address.remote(*key), self._fence))
        return self._arenas[key].slot(holding.slot)

    def read_remote(self, node: str, requests: list[Any]) -> Any:
        return wait_ref(self._order.keepers[node].read.remote(requests), self._fence)
