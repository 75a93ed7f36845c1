"""Making things happen to a running job, whichever system runs it, and reading from its lines what it took."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.jobs import Job, Line, step_times
from orchestrator.local_cluster import LocalCluster

_SETTLED = 6  # steps between two incidents, once everything is warm again


class System(Protocol):
    """A job of one of the systems."""

    job: Job

    def pid(self, rank: int) -> int:
        """Process id of the worker that plays ``rank`` now."""

    def wait_until_warm(self) -> None:
        """Wait until all that the system prepares for the next failure is in place."""

    def phases(self, killed: float) -> dict[str, float]:
        """Where the time since ``killed`` went, in seconds, as far as the system tells."""


@dataclass(frozen=True)
class Recovery:
    """One death, in seconds from the signal.

    seconds   to the end of the first step after it
    regained  to the end of the first step that had not been made before
    again     committed steps that were made again
    """

    seconds: float
    regained: float
    again: int
    phases: dict[str, float]


@dataclass(frozen=True)
class Join:
    """One node that joins.

    pause    seconds by which the gap between two steps was longer than a step
    seconds  from the start of the node's processes to the end of the first step that uses it
    again    committed steps that were made again
    """

    pause: float
    seconds: float
    again: int


@dataclass(frozen=True)
class Measured:
    """All that happened to one system; ``steps_s`` are its undisturbed step times."""

    workers: list[Recovery]
    nodes: list[Recovery]
    joins: list[Join]
    steps_s: list[float]


def measure(system: System, cluster: LocalCluster, num_workers: int, num_nodes: int) -> Measured:
    """Kill ``num_workers`` workers one after the other, then ``num_nodes`` nodes, each of which comes back."""
    job = system.job
    job.next_steps(1)
    system.wait_until_warm()
    steps_s = step_times(job.next_steps(2 * _SETTLED), 0)
    step_s = statistics.median(steps_s)
    workers, nodes, joins = [], [], []
    for index in range(num_workers):
        rank = (3 * index + 1) % job.steps.read()[-1]["world_size"]
        workers.append(_struck(system, step_s, lambda rank=rank: os.kill(system.pid(rank), signal.SIGKILL)))
        system.wait_until_warm()
        job.next_steps(_SETTLED)
    for _ in range(num_nodes):
        nodes.append(_struck(system, step_s, lambda: cluster.kill_node(cluster.nodes[-1])))
        job.next_steps(_SETTLED)
        joins.append(_joined(job, cluster, step_s))
        system.wait_until_warm()
        job.next_steps(_SETTLED)
    return Measured(workers, nodes, joins, steps_s)


def _struck(system: System, step_s: float, strike: Callable[[], object]) -> Recovery:
    """Strike in the middle of a step."""
    job = system.job
    generation = job.next_steps(1)[0]["generation"]
    time.sleep(step_s / 2)
    killed = time.time()
    strike()
    first = _first(job, lambda line: line["generation"] > generation)
    reached = max(line["step"] for line in job.steps.read() if line["generation"] <= generation)
    regained = _first(job, lambda line: line["generation"] > generation and line["step"] > reached)
    return Recovery(
        seconds=first["time"] - killed,
        regained=regained["time"] - killed,
        again=max(0, reached + 1 - first["step"]),
        phases=system.phases(killed),
    )


def _joined(job: Job, cluster: LocalCluster, step_s: float) -> Join:
    small = job.steps.read()[-1]
    started = time.time()
    cluster.add_nodes(1)
    first = _first(job, lambda line: line["time"] > started and line["world_size"] > small["world_size"])
    last = [line for line in job.steps.read() if line["generation"] < first["generation"]][-1]
    return Join(
        pause=first["time"] - last["time"] - step_s,
        seconds=first["time"] - started,
        again=max(0, last["step"] + 1 - first["step"]),
    )


def _first(job: Job, wanted: Callable[[Line], bool]) -> Line:
    return job.wait_for(lambda: next(filter(wanted, job.steps.read()), None), "the first step after an incident")
