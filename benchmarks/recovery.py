"""From SIGKILL to the end of the first step after it, ours and Ray Train v2's, on a cluster of four local Ray nodes.

The same decoder, batches and optimizer on eight workers. Ray Train runs them under DistributedDataParallel with a
checkpoint every ten steps, its default settings otherwise; ours once in the same layout (r8: whole replicas) and once
cut dp2·tp2·pp2, which Ray Train does not offer: there the figures of its own layout stand beside ours. All times are
times of day: just before the signal, and at the end of a step as each system writes it down.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray

from benchmarks import workload
from benchmarks.incidents import Measured, Recovery, System, measure
from benchmarks.jobs import Job, planaria, running
from benchmarks.ray_train_loop import CHECKPOINT_EVERY
from benchmarks.rows import Peer, Row, compare, own
from orchestrator.ledger import PHASES
from orchestrator.local_cluster import local_cluster

NAME = "recovery"
_NODES, _WORKERS = 4, 8
_REPLICATED = ["r8", "r6", "r4"]
_HYBRID = ["dp2·tp2·pp2", "dp3·pp2", "dp2·pp2"]
_STORED_BATCHES = 100


def run(quick: bool) -> list[Row]:
    """Quick: one worker each. In full: five workers and two nodes of ours in each layout; two and one of Ray Train."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as name:
        folder, deaths = Path(name), (1, 0) if quick else (5, 2)
        jobs = (_REPLICATED,) if quick else (_REPLICATED, _HYBRID)
        ours = {layouts[0]: _ours(folder / layouts[0], layouts, *deaths) for layouts in jobs}
        try:
            theirs, note = _ray_train(folder / "ray-train", *((1, 0) if quick else (2, 1))), ""
        except RuntimeError as error:
            theirs, note = Measured([], [], [], []), f", not measured: {str(error).splitlines()[0]}"
    return [row for layout, measured in ours.items() for row in _rows(layout, measured, theirs, note)]


def _rows(layout: str, ours: Measured, theirs: Measured, note: str) -> list[Row]:
    name = f"Ray Train {ray.__version__}{note}"

    def pair(figure: str, of: Callable[[Measured], list[float]], unit: str = "s") -> Row:
        return compare(NAME, f"{layout}: {figure}", of(ours), Peer(name, of(theirs)), unit)

    rows = [
        pair("worker killed: to the end of the first step after it", lambda m: [r.seconds for r in m.workers]),
        pair("worker killed: to the first step not made before", lambda m: [r.regained for r in m.workers]),
        pair("worker killed: committed steps run again", lambda m: [float(r.again) for r in m.workers], "steps"),
        *_phases(f"{layout}: worker killed", ours.workers),
    ]
    if ours.nodes:
        rows += [
            pair("node killed: to the end of the first step after it", lambda m: [r.seconds for r in m.nodes]),
            pair("node killed: to the first step not made before", lambda m: [r.regained for r in m.nodes]),
            pair("node killed: committed steps run again", lambda m: [float(r.again) for r in m.nodes], "steps"),
            *_phases(f"{layout}: node killed", ours.nodes),
            pair("node joins: pause of training", lambda m: [join.pause for join in m.joins]),
            pair("node joins: from its start to its first step", lambda m: [join.seconds for join in m.joins]),
            pair("node joins: committed steps run again", lambda m: [float(j.again) for j in m.joins], "steps"),
        ]
    return [*rows, pair("step, undisturbed", lambda m: m.steps_s)]


def _phases(what: str, recoveries: list[Recovery]) -> Iterator[Row]:
    for phase in PHASES:
        yield own(NAME, f"{what}: of this, {phase}", [recovery.phases[phase] for recovery in recoveries])


def _ours(folder: Path, layouts: list[str], num_workers: int, num_nodes: int) -> Measured:
    job = workload.job((4, _WORKERS), layouts)
    with (
        local_cluster(num_nodes=_NODES, cpus_per_node=_WORKERS // _NODES) as cluster,
        planaria(job, folder, cluster.address) as started,
    ):
        return measure(_Planaria(started), cluster, num_workers, num_nodes)


def _ray_train(folder: Path, num_workers: int, num_nodes: int) -> Measured:
    """Two jobs, since Ray Train's elastic mode is a setting: a fixed number of workers first, then (min, max)."""
    folder.mkdir()
    batches = folder / "batches.npy"
    job = workload.job(_WORKERS, ["dp8"])
    workload.write_batches(job, batches, _STORED_BATCHES)
    fixed = _ray_train_job(folder / "fixed", batches, _WORKERS, num_workers, 0)
    if not num_nodes:
        return fixed
    elastic = _ray_train_job(folder / "elastic", batches, 2, 0, num_nodes)
    return Measured(fixed.workers, elastic.nodes, elastic.joins, fixed.steps_s)


def _ray_train_job(folder: Path, batches: Path, min_workers: int, num_workers: int, num_nodes: int) -> Measured:
    folder.mkdir()
    (folder / "job.yaml").write_text(workload.job(_WORKERS, ["dp8"]).to_yaml())
    command = [sys.executable, "-m", "benchmarks.ray_train_loop", str(batches), str(min_workers), str(_WORKERS)]
    with local_cluster(num_nodes=_NODES, cpus_per_node=_WORKERS // _NODES) as cluster:
        env = {"RAY_ADDRESS": cluster.address, "RAY_TRAIN_V2_ENABLED": "1"}
        with running(command, folder, env, "steps.jsonl", "starts.jsonl") as job:
            return measure(_RayTrain(job), cluster, num_workers, num_nodes)


class _Planaria(System):
    def __init__(self, job: Job) -> None:
        self.job = job

    def pid(self, rank: int) -> int:
        events = self.job.events.read()
        members = next(event["members"] for event in reversed(events) if event["kind"] == "plan")
        worker = members[rank]["worker"]
        return next(e["pid"] for e in events if e["kind"] == "worker_ready" and e["worker"] == worker)

    def wait_until_warm(self) -> None:
        """All workers and a standby on each node."""
        self.job.wait_for(lambda: True if self._num_warm() >= _WORKERS + _NODES else None, "standbys to be warm")

    def _num_warm(self) -> int:
        return sum(psutil.pid_exists(e["pid"]) for e in self.job.events.read() if e["kind"] == "worker_ready")

    def phases(self, killed: float) -> dict[str, float]:
        """Seconds of the incidents since ``killed``; ``detect`` is counted from the signal on."""

        def since() -> list[dict[str, Any]] | None:
            return [e for e in self.job.events.read() if "incident" in e and e["time"] > killed] or None

        incidents = self.job.wait_for(since, "the incident's line, which comes after its step's")
        first = incidents[0]
        phases = {phase: sum(incident["phases"][phase] for incident in incidents) for phase in PHASES}
        return {**phases, "detect": first["since"] + first["phases"]["detect"] - killed}


class _RayTrain(System):
    def __init__(self, job: Job) -> None:
        self.job = job

    def pid(self, rank: int) -> int:
        return next(start["pid"] for start in reversed(self.job.events.read()) if start["rank"] == rank)

    def wait_until_warm(self) -> None:
        """Nothing is kept warm; a checkpoint is there once training has passed the first one."""
        self.job.next_steps(CHECKPOINT_EVERY)

    def phases(self, killed: float) -> dict[str, float]:
        return {}
