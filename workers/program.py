"""What is trained: plain data that the driver can build without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workers.config import DecoderConfig, OptimizerConfig, TrainingConfig


@dataclass(frozen=True)
class Program:
    """Everything that decides the mathematics of a step, whatever the layout.

    ``model`` is the built-in decoder's configuration, or the user's ``build(vocab_size, seq_len) -> nn.Module``.
    """

    model: DecoderConfig | Callable[[int, int], Any]
    optimizer: OptimizerConfig
    training: TrainingConfig
    vocab_size: int
    seq_len: int
