"""Time of an undisturbed step: ours against the same torch parts in a plain loop under torchrun with stock gloo.

The same engine, layouts and batches, one thread per worker; input is held in memory under torchrun and read ahead by a
reader actor in ours; our workers keep the pages of their heap (workers/heap.py), torchrun's have the C library's
defaults. Runs alternate. A figure is a run's median time from the end of one step to the end of the next.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import workload
from benchmarks.jobs import median_step, planaria, running
from benchmarks.rows import Peer, Row, compare, own
from orchestrator.config import JobConfig
from orchestrator.local_cluster import LocalCluster, local_cluster

NAME = "steady"
_SKIP = 8  # steps until everything has settled
_TORCHRUN = f"torchrun, torch {torch.__version__}"
# Off as far as it goes: a copy of the state is made once, at the start, and held nowhere else.
_OFF = {"survive": 0, "snapshot_every": 1_000_000}


@dataclass(frozen=True)
class OurRun:
    """Medians of one run: a step, and of that the wait for input and for snapshots, in seconds."""

    step_s: float
    input_s: float
    stall_s: float


def run(quick: bool) -> list[Row]:
    """Quick: one short run under dp2. In full: two runs of each layout, then of eight workers."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        bench = _Bench(Path(folder), steps=20 if quick else 26)
        rows: list[Row] = []
        with local_cluster(num_nodes=2, cpus_per_node=1) as cluster:
            for layout in ("dp2",) if quick else ("dp2", "tp2", "pp2"):
                rows += bench.against_torchrun(cluster, layout, 2, repeats=1 if quick else 2)
            if not quick:
                rows += bench.protection(cluster, "dp2", 2, repeats=2)
        if not quick:
            with local_cluster(num_nodes=4, cpus_per_node=2) as cluster:
                rows += bench.against_torchrun(cluster, "dp2·tp2·pp2", 8, repeats=2)
                rows += bench.protection(cluster, "dp2·tp2·pp2", 8, repeats=2)
        return rows


class _Bench:
    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self._batches = folder / "batches.npy"
        self._num_runs = 0
        workload.write_batches(workload.job(2, ["dp2"]), self._batches, steps)

    def against_torchrun(self, cluster: LocalCluster, layout: str, size: int, repeats: int) -> list[Row]:
        ours, theirs = [], []
        for _ in range(repeats):
            ours.append(self._ours(cluster, self._job(layout, size, _OFF)))
            theirs.append(self._torchrun(layout, size))
        figure = f"{layout}, {size} workers, protection off"
        waits = [run.input_s for run in ours]
        return [
            compare(NAME, f"{figure}: step", [run.step_s for run in ours], Peer(_TORCHRUN, theirs)),
            own(NAME, f"{figure}: wait for input per step", waits),
        ]

    def protection(self, cluster: LocalCluster, layout: str, size: int, repeats: int) -> list[Row]:
        """What protection costs: the same job with and without, in turns."""
        settings: dict[str, dict[str, Any]] = {
            "every step": {"survive": 1, "snapshot_every": 1},
            "auto": {"survive": 1, "snapshot_every": "auto"},
        }
        off: list[OurRun] = []
        on: dict[str, list[OurRun]] = {name: [] for name in settings}
        for _ in range(repeats):
            off.append(self._ours(cluster, self._job(layout, size, _OFF)))
            for name, protection in settings.items():
                on[name].append(self._ours(cluster, self._job(layout, size, protection)))
        rows = []
        for name, runs in on.items():
            figure = f"{layout}, {size} workers, protection {name}"
            peer = Peer("ours, protection off", [run.step_s for run in off])
            rows.append(compare(NAME, f"{figure}: step", [run.step_s for run in runs], peer))
            rows.append(own(NAME, f"{figure}: training stands still per step", [run.stall_s for run in runs]))
        return rows

    def _job(self, layout: str, size: int, protection: dict[str, Any]) -> JobConfig:
        return workload.job(
            size,
            [layout],
            scaling={"num_workers": size, "standbys_per_node": 0},
            data={"num_readers": 1},
            training={"max_steps": self._steps},
            protection=protection,
        )

    def _ours(self, cluster: LocalCluster, job: JobConfig) -> OurRun:
        with planaria(job, self._next_folder(), cluster.address) as started:
            lines = started.finish()
        input_s, stall_s = (statistics.mean(line[key] for line in lines[_SKIP:]) for key in ("input_s", "stall_s"))
        return OurRun(median_step(lines, _SKIP), input_s, stall_s)

    def _torchrun(self, layout: str, size: int) -> float:
        folder = self._next_folder()
        folder.mkdir()
        (folder / "job.yaml").write_text(self._job(layout, size, _OFF).to_yaml())
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command += ["-m", "benchmarks.torchrun_loop", str(self._batches)]
        with running(command, folder, {}, "steps.jsonl", "events.jsonl") as job:
            return median_step(job.finish(), _SKIP)

    def _next_folder(self) -> Path:
        self._num_runs += 1
        return self._folder / f"run-{self._num_runs}"
