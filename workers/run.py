"""One worker's part in one generation: form the groups, take over the state, train until something ends it."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from checkpointing.holding import HoldingUnusable
from checkpointing.load import KeeperReads, load_state
from pipelines.batches import Cursor
from pipelines.client import InputInterrupted, ReaderClient
from workers.calls import RendezvousClient, wait_for
from workers.device import Device
from workers.engine import Verdict
from workers.fence import Fence, Fenced
from workers.fenced_group import Generation
from workers.host_state import HostState
from workers.kept import Kept
from workers.plan import Order, Outcome
from workers.snapshots import Snapshots

_REPORTS_KEPT = 256
_SNAPSHOT_SHARE = 0.02  # of the step time that snapshots may cost under ``snapshot_every: auto``


class Control:
    """What reaches the training thread from outside in one generation, and what it tells."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.fence = Fence()
        self.stop = threading.Event()
        self.done = threading.Event()
        self.client: ReaderClient | None = None
        self._reports: deque[dict[str, Any]] = deque(maxlen=_REPORTS_KEPT)
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


def play(order: Order, device: Device, control: Control, kept: Kept) -> Outcome:
    """Play ``order``'s rank until the generation ends for this worker; a failure is an outcome, not an error.

    ``kept`` outlives the generation.
    """
    print(f"rank {order.rank} of {order.layout}, generation {order.generation}, from step {order.step}", flush=True)
    training = _Training(order, device, control, kept)
    try:
        return training.run()
    except (Fenced, InputInterrupted) as error:
        return Outcome("fenced", training.step, control.fence.cause or str(error), time.time())
    except Exception as error:
        if control.fence.tripped:
            return Outcome("fenced", training.step, control.fence.cause, time.time())
        control.fence.trip(f"rank {order.rank} raised {type(error).__name__}: {error}")
        traceback.print_exc()
        unusable = error.key if isinstance(error, HoldingUnusable) else None
        return Outcome("failed", training.step, traceback.format_exc(limit=-8), time.time(), unusable)
    finally:
        training.close()


class _Training:
    def __init__(self, order: Order, device: Device, control: Control, kept: Kept) -> None:
        self.order, self.device, self.control, self.kept = order, device, control, kept
        self.step, self.cursor, self.tokens = order.step, Cursor.from_list(order.cursor), order.tokens
        self._closers: list[Callable[[], None]] = []

    def run(self) -> Outcome:
        self._read_ahead()
        self._regroup()
        self._take_over()
        return self._loop()

    def close(self) -> None:
        for close in reversed(self._closers):
            close()

    def _read_ahead(self) -> None:
        """Begin to fetch the first batch while the groups form."""
        order, fence = self.order, self.control.fence
        self.client = self.control.client = ReaderClient(
            order.readers,
            lambda reader, method, args: wait_for(getattr(reader, method).remote(*args), fence),
            data_size=order.layout.data_size,
            data_rank=order.layout.data_rank(order.layout.coordinates(order.rank)),
            micro_batch_rows=order.program.training.micro_batch_rows,
            timeout_s=order.detect_bound_s,
        )
        self._closers.append(self.client.close)
        fence.on_trip(self.client.interrupt)
        self.client.prefetch(self.cursor)

    def _regroup(self) -> None:
        order = self.order
        started = time.monotonic()
        self.generation = Generation.form(
            RendezvousClient(order.rendezvous),
            number=order.generation,
            rank=order.rank,
            world_size=order.layout.size,
            fence=self.control.fence,
            device=self.device,
            deadline=order.detect_bound_s,
        )
        self._closers.append(self.generation.dissolve)
        self.generation.watch_peers()
        self.engine = self.kept.engine_for(order, self.device.torch)
        self.engine.check = self.control.fence.check
        self.control.report("regrouped", seconds=time.monotonic() - started)

    def _take_over(self) -> None:
        """Fill the model from the survivors' memory (or disk), or start fresh; then protect it in this generation."""
        order, fence = self.order, self.control.fence
        started = time.monotonic()
        state = HostState(self.engine.local_state(), self.device)
        if order.spared is None or order.spared != self.kept.state:  # else this worker has that state already
            self.kept.state = None
            self._load(state)
        if order.fetches is not None:
            self.engine.vote(stop=False)  # all have verified the source before anybody writes over what came before it
        self.snapshots = Snapshots(order, state, fence, self.kept.arena)
        self._closers.append(self.snapshots.close)
        self.snapshots.take(self.step, self._meta(), durable=False)
        self.kept.state = order.generation, self.step
        self.control.report("taken_over", seconds=time.monotonic() - started)

    def _load(self, state: HostState) -> None:
        order = self.order
        if order.fetches is None:
            self.engine.initialize()
            return
        keepers = KeeperReads(lambda node, asked: wait_for(order.keepers[node].read.remote(asked), self.control.fence))
        load_state(order.fetches, state.arrays, keepers, self.kept.arena.arena)
        state.push()

    def _loop(self) -> Outcome:
        """Steps: forward and backward, one vote, then the optimizer moves; the next vote commits the snapshot."""
        order, control = self.order, self.control
        step_s = 0.0
        while True:
            started = time.monotonic()
            batch = self.client.next(self.cursor)
            input_s = time.monotonic() - started
            self.engine.forward_backward(batch)
            stall_s = self.snapshots.wait_held()
            verdict = self.engine.vote(control.stop.is_set(), self.snapshots.cost_s, step_s)
            self.kept.state = None
            lr = self.engine.apply(verdict, self.step + 1)
            self.step += 1
            self.kept.state = order.generation, self.step
            self.cursor = batch.next
            self.tokens += batch.num_valid
            finished = order.program.training.is_over(self.step, self.tokens)
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
                "held_step": self.snapshots.last_step,
                **self._evaluate(),
            }
            step_s = time.monotonic() - started - stall_s
            if last or durable or self._snapshot_is_due(verdict):
                self.snapshots.take(self.step, self._meta(), durable)
            if last:
                stall_s += self.snapshots.wait_held()
                self.generation.let_peers_go()
                self.engine.vote(stop=True)  # nobody leaves before all hold the last snapshot
            control.report(
                "step",
                **report,
                step_time_s=time.monotonic() - started,
                input_s=input_s,
                stall_s=stall_s,
                durable=durable,
            )
            if last:
                return Outcome("finished" if finished else "paused", self.step)

    def _snapshot_is_due(self, verdict: Verdict) -> bool:
        """Every so many steps; under ``auto``, when the steps since the last one make its cost a small enough share."""
        num_steps = self.step - self.snapshots.last_step
        every = self.order.snapshot_every
        return num_steps >= (verdict.snapshot_cost / _SNAPSHOT_SHARE if every == "auto" else every)

    def _evaluate(self) -> dict[str, float]:
        training = self.order.program.training
        if not training.eval_every or self.step % training.eval_every:
            return {}
        return {"eval_loss": self.engine.evaluate(self.client.eval_batch(training.eval_rows))}

    def _meta(self) -> dict[str, Any]:
        return {"cursor": self.cursor.to_list(), "tokens": self.tokens}
