"""Drivers of a run as real processes, for test_runfolder; a module of its own, so that they start quickly."""

from __future__ import annotations

import signal
from multiprocessing.synchronize import Barrier
from typing import Any

from orchestrator.config import JobConfig
from orchestrator.runfolder import RunFolder, RunRefused

JOB = JobConfig.from_dict({"scaling": {"num_workers": 2}, "training": {"max_steps": 5}})


def race(path: str, barrier: Barrier, results: Any) -> None:
    """Try to get the run at the same moment as the others; put the epoch or None."""
    run = RunFolder(path, "run")
    barrier.wait()
    try:
        results.put(run.acquire(JOB).epoch)
    except RunRefused:
        results.put(None)
    barrier.wait()  # alive until all have tried


def drive_forever(path: str, ready: Any) -> None:
    """Get the run, commit a step, and wait to be killed."""
    run = RunFolder(path, "run")
    run.acquire(JOB)
    run.append_metrics({"step": 1, "generation": 1, "loss": 3.0})
    ready.put(True)
    signal.pause()
