"""A snapshot of 500 MB (parameters and AdamW's state of one worker) after every step: how long training stands still.

Ours, as jobs make them: into the memory of the node's keeper, with digests. Theirs:
`torch.distributed.checkpoint.async_save` to tmpfs with its defaults, without digests, in a plain loop of the same
engine, waiting when the save before is still under way. One worker with one thread, so that a core is free beside it.
Runs alternate. A stall is what the training thread waits, as the mean of a run's steps; what a step takes longer than
in the same loop without snapshots (medians) is all that they cost.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import workload
from benchmarks.jobs import Line, median_step, planaria, running
from benchmarks.rows import Peer, Row, compare, own
from orchestrator.config import JobConfig
from orchestrator.local_cluster import LocalCluster, local_cluster

NAME = "snapshot"
_SKIP = 4  # steps until memory has been touched
_DCP = f"torch.distributed.checkpoint {torch.__version__}, async_save"
_OFF = {"survive": 0, "snapshot_every": 1_000_000}
_ON = {"survive": 0, "snapshot_every": 1}


@dataclass(frozen=True)
class Run:
    """Of one run: the median step, and the mean time per step for which training stood still. Seconds."""

    step_s: float
    stall_s: float


def run(quick: bool) -> list[Row]:
    """Quick: a tenth of it, one run each of 8 steps. In full: 500 MB, three runs of 24 steps."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        bench = _Bench(Path(folder), quick)
        runs: dict[str, list[Run]] = {}
        with local_cluster(num_nodes=1, cpus_per_node=1) as cluster:
            for _ in range(1 if quick else 3):
                for way, measure in {
                    "off": lambda: bench.ours(cluster, _OFF),
                    "loop": lambda: bench.loop(snapshots=False),
                    "ours": lambda: bench.ours(cluster, _ON),
                    "dcp": lambda: bench.loop(snapshots=True),
                }.items():
                    runs.setdefault(way, []).append(measure())
        return _rows(runs)


def _rows(runs: dict[str, list[Run]]) -> list[Row]:
    def stalls(way: str) -> list[float]:
        return [run.stall_s for run in runs[way]]

    def longer(way: str, without: str) -> list[float]:
        return [run.step_s - other.step_s for run, other in zip(runs[way], runs[without], strict=True)]

    without = Peer("plain loop", [run.step_s for run in runs["loop"]])
    return [
        compare(NAME, "training stands still per step", stalls("ours"), Peer(_DCP, stalls("dcp"))),
        own(NAME, "of a step", [100 * run.stall_s / run.step_s for run in runs["ours"]], "%"),
        compare(NAME, "step, longer than without", longer("ours", "off"), Peer(_DCP, longer("dcp", "loop"))),
        compare(NAME, "step without snapshots", [run.step_s for run in runs["off"]], without),
    ]


class _Bench:
    def __init__(self, folder: Path, quick: bool) -> None:
        self._folder, self._num_runs = folder, 0
        self._model = {"dim": 256, "num_layers": 4, "num_heads": 8, "num_kv_heads": 8, "ffn_dim": 704}
        self._steps = 8
        if not quick:
            self._model |= {"dim": 640, "num_layers": 8, "ffn_dim": 1792}
            self._steps = 24
        self._batches = folder / "batches.npy"
        workload.write_batches(self._job(_OFF), self._batches, self._steps)

    def ours(self, cluster: LocalCluster, protection: dict[str, int]) -> Run:
        with planaria(self._job(protection), self._next_folder(), cluster.address) as job:
            return self._of(job.finish())

    def loop(self, snapshots: bool) -> Run:
        folder = self._next_folder()
        folder.mkdir()
        (folder / "job.yaml").write_text(self._job(_OFF).to_yaml())
        with tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as memory:
            command = [sys.executable, "-m", "benchmarks.snapshot_loop", str(self._batches)]
            with running([*command, memory if snapshots else "-"], folder, {}, "steps.jsonl", "events.jsonl") as job:
                return self._of(job.finish())

    @staticmethod
    def _of(lines: list[Line]) -> Run:
        return Run(median_step(lines, _SKIP), statistics.mean(line["stall_s"] for line in lines[_SKIP:]))

    def _job(self, protection: dict[str, int]) -> JobConfig:
        return workload.job(
            1,
            ["dp1"],
            scaling={"standbys_per_node": 0},
            model=self._model,
            data={"num_readers": 1},
            training={"max_steps": self._steps, "global_batch_rows": 2},
            protection=protection,
        )

    def _next_folder(self) -> Path:
        self._num_runs += 1
        return self._folder / f"run-{self._num_runs}"
