"""What a worker process does before it is needed, so that its first step finds everything loaded."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from checkpointing.layout import Layout
from workers.config import DecoderConfig, OptimizerConfig, TrainingConfig
from workers.engine import Engine
from workers.program import Program


def warm_up(device: torch.device) -> None:
    """Run a tiny model through all that a first step loads lazily. Needs a process without a default process group."""
    model = DecoderConfig(dim=8, num_layers=1, num_heads=1, num_kv_heads=1, ffn_dim=8)
    program = Program(model, OptimizerConfig(), TrainingConfig(micro_batch_rows=1), vocab_size=8, seq_len=8)
    rows = np.zeros((1, program.seq_len), np.int32)
    batch = SimpleNamespace(tokens=rows, targets=rows, positions=rows, segments=rows, num_valid=rows.size, cursor=0)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        engine = Engine(program, Layout(), 0, device)
        engine.initialize()
        engine.forward_backward(batch)
        engine.apply(engine.vote(stop=False), 1)
        engine._run_pipeline(batch)
        engine.evaluate(batch)
    finally:
        dist.destroy_process_group()
