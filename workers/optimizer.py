"""AdamW over this rank's local shards, its learning rate as a function of the step, and what state it keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from workers.config import OptimizerConfig


def build_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW; matrices decay, vectors (norms, biases) do not. The learning rate is set at each step."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, fused=True)


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state now, as the first step would find it; parameters stay as they are.

    torch creates state inside ``step``. A step with zero gradients at rate zero moves nothing and leaves all moments at
    zero; only the step count has to be set back.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for p in parameters:
        p.grad = None
        for value in optimizer.state[p].values():
            value.zero_()


def states_of(config: OptimizerConfig, dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """State name -> value, as the optimizer makes them for a parameter of ``shape``."""
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = build_optimizer(config, [parameter])
    materialise(optimizer)
    return dict(optimizer.state[parameter])


def learning_rate(config: OptimizerConfig, step: int, max_steps: int | None) -> float:
    """Rate of step number ``step``, from 1: linear warm-up to ``lr``, then cosine down to ``min_lr_ratio * lr``.

    The lowest rate is reached at step ``decay_steps`` (default ``max_steps``) and kept; without both the peak is kept.
    """
    assert step >= 1, step
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    decay_steps = config.decay_steps or max_steps
    if decay_steps is None:
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, decay_steps - config.warmup_steps))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2)
