"""The peer of `recovery`: the same decoder, batches and AdamW under Ray Train v2, as its documentation lays them out.

``python -m benchmarks.ray_train_loop BATCHES.npy MIN MAX`` beside a job.yaml: DistributedDataParallel, a checkpoint
from rank 0 every few steps, unlimited failures; elastic when MIN < MAX. It writes ``steps.jsonl`` and ``starts.jsonl``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHECKPOINT_EVERY = 10


def train(config: dict[str, Any]) -> None:
    """One worker's loop."""
    import numpy as np
    import ray.train.torch
    import torch
    import torch.distributed as dist

    from benchmarks.workload import program_of, read_batch
    from orchestrator.config import JobConfig
    from workers.models.decoder import Decoder
    from workers.models.spec import token_loss
    from workers.optimizer import build_optimizer, learning_rate

    torch.set_num_threads(1)
    folder = Path(config["folder"])
    program = program_of(JobConfig.from_yaml(folder / "job.yaml"))
    stored = np.load(config["batches"])
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    entered = torch.tensor([time.time()], dtype=torch.float64)
    dist.broadcast(entered, 0)
    _append(folder / "starts.jsonl", {"generation": entered.item(), "rank": rank, "pid": os.getpid()})

    torch.manual_seed(program.training.seed)
    model = Decoder(program.model, program.vocab_size, range(program.model.num_layers))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    step, state = 0, None
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        step = state["step"]
    model = ray.train.torch.prepare_model(model)
    optimizer = build_optimizer(program.optimizer, model.parameters())
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])

    micro_rows = program.training.micro_batch_rows
    while True:
        step += 1
        batch = read_batch(stored, step, world_size, rank, micro_rows)
        parts = [
            torch.from_numpy(array).long().split(micro_rows)
            for array in (batch.tokens, batch.targets, batch.positions, batch.segments)
        ]
        optimizer.zero_grad()
        total = torch.zeros(())
        for index, (tokens, targets, positions, segments) in enumerate(zip(*parts, strict=True), start=1):
            model.require_backward_grad_sync = index == len(parts[0])
            # The loss of the global batch; DDP averages what has to be summed.
            loss = token_loss(model(tokens, positions, segments), targets) / batch.num_valid
            (loss * world_size).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), program.optimizer.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(program.optimizer, step, None)
        optimizer.step()
        dist.all_reduce(total)
        if rank == 0:
            line = {"time": time.time(), "step": step, "loss": total.item(), "world_size": world_size}
            _append(folder / "steps.jsonl", {**line, "generation": entered.item()})
        if step % CHECKPOINT_EVERY == 0:
            metrics = {"loss": total.item(), "step": step}
            with tempfile.TemporaryDirectory() as directory:
                saved = None
                if rank == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(directory) / "state.pt")
                    saved = ray.train.Checkpoint.from_directory(directory)
                ray.train.report(metrics, checkpoint=saved)


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("ab") as file:
        file.write(json.dumps(line).encode() + b"\n")


def main(batches: str, minimum: int, maximum: int) -> None:
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(os.environ["RAY_ADDRESS"])
    folder = str(Path.cwd())
    TorchTrainer(
        train,
        train_loop_config={"folder": folder, "batches": batches},
        scaling_config=ScalingConfig(num_workers=maximum if minimum == maximum else (minimum, maximum)),
        run_config=RunConfig(
            name="ray-train",
            storage_path=f"{folder}/storage",
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
