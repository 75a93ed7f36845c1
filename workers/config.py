"""What a user says about the model and how it is trained. No torch here: the command line reads it in milliseconds."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A strict, frozen section of a job: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class DecoderConfig(Section):
    """The built-in decoder language model (RMSNorm, RoPE, grouped-query attention, SwiGLU)."""

    dim: int = Field(256, ge=8, description="width of the residual stream")
    num_layers: int = Field(6, ge=1)
    num_heads: int = Field(8, ge=1)
    num_kv_heads: int = Field(4, ge=1)
    ffn_dim: int = Field(768, ge=8, description="hidden width of the SwiGLU block")
    rope_theta: float = Field(10000.0, gt=0)
    norm_eps: float = Field(1e-5, gt=0)


class OptimizerConfig(Section):
    """AdamW with linear warm-up and cosine decay to ``min_lr_ratio`` of the peak."""

    lr: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    warmup_steps: int = Field(10, ge=0)
    decay_steps: int | None = Field(None, ge=1, description="steps until the lowest rate; default training.max_steps")
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this global L2 norm")


class TrainingConfig(Section):
    """How long, how much per step, in which precision."""

    max_steps: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    max_time_s: float | None = Field(None, gt=0, description="of this driver, its start included")
    global_batch_rows: int = Field(16, ge=1, description="rows (sequences) per step over all workers")
    micro_batch_rows: int = Field(2, ge=1, description="rows per forward pass of one data rank")
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    eval_every: int = Field(0, ge=0, description="steps between evaluations on held-out text; 0 is never")
    eval_rows: int = Field(16, ge=1, description="rows of held-out text in one evaluation")
    seed: int = Field(0, ge=0)

    def is_over(self, step: int, tokens: int) -> bool:
        """Whether a job that has made ``step`` steps on ``tokens`` valid tokens is at its end (time apart)."""
        by_steps = self.max_steps is not None and step >= self.max_steps
        return by_steps or (self.max_tokens is not None and tokens >= self.max_tokens)
