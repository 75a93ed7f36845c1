"""The peer of `steady`: our engine's torch parts in the loop that one would write without an orchestrator.

``torchrun -m benchmarks.torchrun_loop BATCHES.npy`` beside a job.yaml; rank 0 writes the end of each step to
``steps.jsonl`` when all are done.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.workload import program_of, read_batch
from checkpointing.layout import Layout
from orchestrator.config import JobConfig
from workers.engine import Engine


def main(batches: str) -> None:
    torch.set_num_threads(1)
    job = JobConfig.from_yaml("job.yaml")
    layout = Layout.parse(job.layout[0])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    engine = Engine(program_of(job), layout, rank, torch.device("cpu"))
    engine.initialize()
    stored = np.load(batches)
    data_rank = layout.data_rank(layout.coordinates(rank))
    steps = range(1, job.training.max_steps + 1)
    rows = job.training.micro_batch_rows
    ready = [read_batch(stored, step, layout.data_size, data_rank, rows) for step in steps]
    lines = []
    for step, batch in zip(steps, ready, strict=True):
        engine.forward_backward(batch)
        verdict = engine.vote(stop=False)
        engine.apply(verdict, step)
        lines.append({"time": time.time(), "step": step, "loss": verdict.loss})
    if rank == 0:
        Path("steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
