"""Train an ``nn.Module`` of your own: written for one device, trained data-parallel over two workers.

    python examples/own_module.py

Planaria calls ``build(vocab_size, seq_len)`` on every worker under the same seed. The module maps tokens [B, S] (int64)
to logits [B, S, vocab_size]; it may also take ``positions`` and ``segments`` [B, S], which say where in which document
a token stands (rows hold several documents). The same model from a job's YAML: ``model: own_module:build``.
"""

from __future__ import annotations

import sys

from torch import Tensor, nn

from orchestrator import ElasticTrainer, JobConfig


class Recurrent(nn.Module):
    """A small GRU language model."""

    def __init__(self, vocab_size: int, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.gru(self.embedding(tokens))
        return self.output(self.norm(hidden))


def build(vocab_size: int, seq_len: int) -> nn.Module:
    return Recurrent(vocab_size)


def main(*overrides: str) -> None:
    job = JobConfig.from_dict(
        {
            "run": {"storage_path": "runs"},
            "scaling": {"num_workers": [1, 2], "resources_per_worker": {"CPU": 0.5}},
            "layout": ["dp2", "1"],
            "data": {"seq_len": 64, "vocab_size": 1024},
            "optimizer": {"lr": 5e-3, "warmup_steps": 5},
            "training": {"max_steps": 30, "global_batch_rows": 8, "micro_batch_rows": 4},
        },
        overrides,
    )
    result = ElasticTrainer(job, model=build).fit()
    if result.error is not None:
        raise SystemExit(f"it failed: {result.error}")
    first, last = result.metrics_dataframe["loss"].iloc[[0, -1]]
    print(f"loss {first:.3f} -> {last:.3f} in {result.metrics['step']} steps, {len(result.incidents)} incidents")
    print(f"checkpoint: {result.checkpoint.path}")
    print(f"the run's folder: {result.path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
