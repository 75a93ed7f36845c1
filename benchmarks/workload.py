"""The one workload of these benchmarks: the demo's decoder on the standard library's text, for ours and the peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.config import JobConfig
from pipelines.batches import Batch, BatchBuilder, Cursor, RankBatch
from pipelines.corpus import Corpus
from pipelines.packing import Rows
from pipelines.tokenizer import train_or_load
from workers.program import Program


def job(num_workers: int | tuple[int, int], layouts: list[str], **overrides: dict[str, Any]) -> JobConfig:
    """Some 5 million parameters, 12 rows of 128 tokens per step. ``overrides`` are merged into its sections."""
    sections: dict[str, Any] = {
        "run": {"name": "run", "storage_path": "."},
        "scaling": {"num_workers": num_workers},
        "layout": layouts,
        "model": {"dim": 256, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 704},
        "data": {"text": "stdlib", "seq_len": 128, "vocab_size": 4096},
        "training": {"max_steps": 100_000, "global_batch_rows": 12, "micro_batch_rows": 2},
        "optimizer": {"lr": 2e-3, "warmup_steps": 10, "decay_steps": 1000},
        "orphan_grace_s": 20.0,
    }
    for name, section in overrides.items():
        sections[name] = {**sections.get(name, {}), **section}
    return JobConfig.from_dict(sections)


def program_of(config: JobConfig) -> Program:
    return Program(config.model, config.optimizer, config.training, config.data.vocab_size, config.data.seq_len)


def write_batches(config: JobConfig, path: Path, count: int) -> None:
    """The first ``count`` global batches of ``config`` as one array, so that a peer reads its input from memory."""
    corpus = Corpus.open(config.data.text)
    tokenizer = train_or_load(corpus, config.data.vocab_size)
    builder = BatchBuilder(corpus, tokenizer, config.data, config.training.global_batch_rows, config.training.seed)
    cursor, arrays = Cursor(), []
    for _ in range(count):
        batch = builder.batch(cursor)
        rows = batch.rows
        arrays.append(np.stack([rows.tokens, rows.targets, rows.positions, rows.segments]))
        cursor = batch.next
    np.save(path, np.stack(arrays))


def read_batch(stored: np.ndarray, step: int, data_size: int, data_rank: int, micro_batch_rows: int) -> RankBatch:
    """One data rank's rows of the batch of ``step`` (from 1); after the last stored batch comes the first again."""
    at = (step - 1) % len(stored)
    rows, cursor = Rows(*stored[at]), Cursor(0, 0, at)
    return Batch(rows, rows.num_valid, "", (), cursor, cursor).for_rank(data_size, data_rank, micro_batch_rows)
