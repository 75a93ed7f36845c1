"""One generation at work, seen from the driver: start the ranks, follow their reports, notice a death, end it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from checkpointing.transfer import Holding
from orchestrator.nodes import Nodes, WorkerHandle
from orchestrator.readers import Readers
from workers.plan import Order, Outcome, Plan

# Who has not answered a call on its own thread for this long, once something is known to be wrong, counts as dead.
ANSWER_S = 1.0
# Before state is given up because some do not answer: longer than Ray takes to tell a dead node.
LAST_CALL_S = 20.0
_LEAST_PATIENCE_S = 0.3
_PING_EVERY_S = 1.0
_POLL_S = 2.0


@dataclass(frozen=True)
class Ended:
    """How a generation ended: kind "finished", "paused" or "failed".

    For a failure ``cause``, ``since`` (time of day of the first sign), ``unusable`` (key of a holding to leave out) and
    whether a rank ``raised`` (the others then tell of a lost peer only).
    """

    kind: str
    step: int
    cause: str = ""
    since: float = 0.0
    unusable: Any = None
    raised: bool = False


@dataclass(frozen=True)
class Survivors:
    """What is left after a failure. ``raised``: how it ended for a rank that raised, when one did."""

    dead_workers: tuple[str, ...]
    dead_nodes: tuple[str, ...]
    holdings: tuple[Holding, ...]
    reports: tuple[dict[str, Any], ...]
    raised: Ended | None


class Running:
    """The ranks of one generation while they run."""

    def __init__(
        self, plan: Plan, orders: list[Order], workers: dict[str, WorkerHandle], detect_bound_s: float
    ) -> None:
        self.plan = plan
        self._bound_s = detect_bound_s
        self._members = [workers[member.worker] for member in plan.members]
        self._runs = {
            worker.actor.run.remote(order): rank
            for rank, (worker, order) in enumerate(zip(self._members, orders, strict=True))
        }
        self._seen = 0
        self._poll = self._next_poll()
        self._pings: dict[Any, tuple[int, float]] = {}
        self._ping_every_s = min(_PING_EVERY_S, detect_bound_s / 4)
        self._next_ping = time.monotonic()

    def _next_poll(self) -> Any:
        return self._members[0].actor.reports.remote(self.plan.generation, self._seen, _POLL_S)

    def wait(self, timeout_s: float) -> tuple[list[dict[str, Any]], Ended | None]:
        """New reports of rank 0 and, once the generation has ended, how. Returns early when there is news."""
        self._ping()
        ready, _ = ray.wait([*self._runs, self._poll, *self._pings], num_returns=1, timeout=timeout_s)
        reports: list[dict[str, Any]] = []
        ended = None
        for ref in ready:
            if ref == self._poll:
                reports, ended = self._read_poll()
            elif ref in self._pings:
                rank, _ = self._pings.pop(ref)
                ended = self._failure_of(rank, ref) if _error_of(ref) else None
            else:
                ended = self._read_run(ref)
        return reports, ended or self._silent()

    def _read_poll(self) -> tuple[list[dict[str, Any]], Ended | None]:
        if _error_of(self._poll):
            return [], self._failure_of(0, self._poll)
        reports = self._take(ray.get(self._poll))
        self._poll = self._next_poll()
        return reports, None

    def _take(self, reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
        fresh = [report for report in reports if report["seq"] > self._seen]
        if fresh:
            self._seen = fresh[-1]["seq"]
        return fresh

    def _read_run(self, ref: Any) -> Ended | None:
        rank = self._runs.pop(ref)
        if _error_of(ref):
            return self._failure_of(rank, ref)
        outcome: Outcome = ray.get(ref)
        if outcome.kind in ("finished", "paused"):
            # The last vote said that every member holds the last snapshot; the others are on their way out too.
            return Ended(outcome.kind, outcome.step)
        where = f"rank {rank} on {self._members[rank].node}"
        cause, raised = f"{where}: {outcome.cause}", outcome.kind == "failed"
        return Ended("failed", outcome.step, cause, outcome.ended_at, outcome.unusable, raised)

    def _failure_of(self, rank: int, ref: Any) -> Ended:
        error = _error_of(ref)
        assert error is not None
        where = f"rank {rank} on {self._members[rank].node}"
        return Ended("failed", -1, f"{where} died ({type(error).__name__})", time.time())

    def _ping(self) -> None:
        now = time.monotonic()
        if now < self._next_ping:
            return
        self._next_ping = now + self._ping_every_s
        waiting = {rank for rank, _ in self._pings.values()}
        for rank, worker in enumerate(self._members):
            if rank not in waiting:
                self._pings[worker.actor.ping.remote()] = (rank, now)

    def _silent(self) -> Ended | None:
        """A member that does not answer is taken for hung, so that it blocks nobody for longer than the bound.

        It may have hung right after it answered the ping before.
        """
        now, allowed = time.monotonic(), self._bound_s - self._ping_every_s
        for ref, (rank, asked) in self._pings.items():
            # The answer may be here already, when it is the driver that was held up.
            if now - asked > allowed and not ray.wait([ref], timeout=0)[0]:
                cause = f"rank {rank} on {self._members[rank].node} has been silent for {allowed:g} s"
                return Ended("failed", -1, cause, time.time() - (now - asked))
        return None

    def stop_after_step(self) -> None:
        """Ask for a stop at the next vote; one member's word is enough."""
        self._members[0].actor.stop_after_step.remote()

    def use_readers(self, readers: Readers) -> None:
        """A reader died or moved: tell the members where to read from now on."""
        for worker in self._members:
            worker.actor.use_readers.remote(readers.preference(worker.node))

    def drain(self) -> list[dict[str, Any]]:
        """After a planned end: wait for every rank to leave, and the reports that were still on their way."""
        ray.wait(list(self._runs), num_returns=len(self._runs), timeout=self._bound_s)
        call = self._members[0].actor.reports.remote(self.plan.generation, self._seen, 0)
        ready, _ = ray.wait([call], timeout=ANSWER_S)
        return self._take(ray.get(call)) if ready and not _error_of(call) else []

    def quiesce(self, ended: Ended, nodes: Nodes, patience: float = ANSWER_S) -> Survivors:
        """Fence the generation everywhere, wait until the survivors are out of it, and list what they hold.

        Membership is who answers a call beside the training thread now; not who returned from training, and not Ray's
        own detection, which takes some 13 s for a killed node. Who is slower than ``patience`` counts as dead; asking
        again, with more of it, is safe.
        """
        generation = self.plan.generation
        keepers = {node.name: node.keeper.fence.remote(generation + 1) for node in nodes if node.starting is None}
        fences = {worker.id: worker.actor.fence.remote(generation, ended.cause) for worker in self._members}
        answered = _who_answers({**keepers, **fences}, patience)
        dead_nodes = set(keepers) - answered
        dead = {worker.id for worker in self._members if worker.node in dead_nodes or worker.id not in answered}
        alive = [worker for worker in self._members if worker.id not in dead]
        quiesced = {worker.id: worker.actor.quiesced.remote(generation, self._bound_s) for worker in alive}
        deadline = time.monotonic() + self._bound_s + ANSWER_S
        reports: list[dict[str, Any]] = []
        for name, ref in quiesced.items():
            told = ray.get(ref) if _answers(ref, deadline) else None
            if told is None:
                dead.add(name)  # its training thread is stuck somewhere: it cannot play a rank again
            else:
                reports += told
        holdings, dead_keepers = take_inventory(nodes, set(keepers) - dead_nodes, patience)
        # Every member reports the same things in the same order, so equal numbers are equal reports.
        by_number = {report["seq"]: report for report in reports}
        latest = self._take([by_number[number] for number in sorted(by_number)])
        return Survivors(
            tuple(sorted(dead)),
            tuple(sorted(dead_nodes | dead_keepers)),
            tuple(holdings),
            tuple(latest),
            self._who_raised([rank for rank, worker in enumerate(self._members) if worker.id not in dead]),
        )

    def _who_raised(self, alive: Sequence[int]) -> Ended | None:
        """These ranks have left training: the end of one that raised, if one did."""
        left = [ref for ref, rank in self._runs.items() if rank in alive]
        done = ray.wait(left, num_returns=len(left), timeout=ANSWER_S)[0] if left else []
        ends = [self._read_run(ref) for ref in done]
        return next((ended for ended in ends if ended is not None and ended.raised), None)


def call_roll(nodes: Nodes) -> tuple[set[str], set[str]]:
    """Workers and nodes that do not answer, among those that had started."""
    keepers = {node.name: node.keeper.inventory.remote() for node in nodes if node.starting is None}
    pings = {worker.id: worker.actor.ping.remote() for worker in nodes.ready_workers().values()}
    silent = (keepers.keys() | pings.keys()) - _who_answers({**keepers, **pings})
    return silent - keepers.keys(), silent & keepers.keys()


def take_inventory(nodes: Nodes, names: set[str], patience: float = ANSWER_S) -> tuple[list[Holding], set[str]]:
    """What the keepers of these nodes hold, and which of them did not answer."""
    calls = {name: nodes[name].keeper.inventory.remote() for name in names}
    answered = _who_answers(calls, patience)
    return [holding for name in sorted(answered) for holding in ray.get(calls[name])], names - answered


def _who_answers(calls: dict[str, Any], patience: float = ANSWER_S) -> set[str]:
    """The names whose calls return without an error, of calls that all take about as long.

    A dead node's calls simply hang. Waiting ends early when the others answered so much faster that it must be one.
    """
    names = {ref: name for name, ref in calls.items()}
    waiting, started, may_hurry = list(names), time.monotonic(), patience <= ANSWER_S
    answered = set()
    while waiting and (left := started + patience - time.monotonic()) > 0:
        done, waiting = ray.wait(waiting, timeout=left)
        answered |= {names[ref] for ref in done if _error_of(ref) is None}
        if may_hurry and done and len(waiting) <= len(names) // 2:
            patience = min(ANSWER_S, max(_LEAST_PATIENCE_S, 5 * (time.monotonic() - started)))
    return answered


def _answers(ref: Any, deadline: float) -> bool:
    ready, _ = ray.wait([ref], timeout=max(0.0, deadline - time.monotonic()))
    return bool(ready) and _error_of(ref) is None


def _error_of(ref: Any) -> Exception | None:
    """The error that a finished call ended with: its actor died, or the method raised."""
    try:
        ray.get(ref)
    except ray.exceptions.RayError as error:
        return error
    return None
