"""The peer of `snapshot`: one worker's plain loop, with or without `torch.distributed.checkpoint.async_save` per step.

``python -m benchmarks.snapshot_loop BATCHES.npy FOLDER`` beside a job.yaml; FOLDER is "-" for no snapshots. Each step's
end goes to ``steps.jsonl``, with the seconds for which training stood still for its snapshot.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.workload import program_of, read_batch
from checkpointing.layout import Layout
from orchestrator.config import JobConfig
from workers.engine import Engine


class _Snapshots:
    """The last two, as ours: one that is whole, and one that is being written."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self._folder, self._group = folder, dist.new_group(backend="gloo")
        self._state = {piece.name: tensor for piece, tensor in engine.local_state().items()}
        self._pending: Future[Any] | None = None

    def take(self, step: int) -> None:
        """Only one may be under way; so this waits for the one before."""
        if self._pending is not None:
            self._pending.result()
            shutil.rmtree(self._folder / str(step - 2), ignore_errors=True)
        pending = dcp.async_save(self._state, checkpoint_id=self._folder / str(step), process_group=self._group)
        assert isinstance(pending, Future)
        self._pending = pending


def main(batches: str, folder: str) -> None:
    torch.set_num_threads(1)
    job = JobConfig.from_yaml("job.yaml")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = Engine(program_of(job), Layout(), 0, torch.device("cpu"))
    engine.initialize()
    snapshots = None if folder == "-" else _Snapshots(Path(folder), engine)
    stored = np.load(batches)
    with open("steps.jsonl", "w") as lines:
        for step in range(1, job.training.max_steps + 1):
            engine.forward_backward(read_batch(stored, step, 1, 0, job.training.micro_batch_rows))
            verdict = engine.vote(stop=False)
            engine.apply(verdict, step)
            begun = time.monotonic()
            if snapshots:
                snapshots.take(step)
            stall_s = time.monotonic() - begun
            print(json.dumps({"time": time.time(), "step": step, "loss": verdict.loss, "stall_s": stall_s}), file=lines)
    if snapshots:
        snapshots.take(job.training.max_steps + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
