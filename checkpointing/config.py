"""What a user says about protection and durable checkpoints. Plain pydantic, nothing heavy imported."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ProtectionConfig(BaseModel):
    """The memory tier: how often the state is copied, and how many node losses it must survive."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    survive: int = Field(1, ge=0, le=1, description="node losses that memory alone must survive")
    snapshot_every: int | Literal["auto"] = Field(
        1, description="steps between snapshots; auto keeps the cost under 2 %"
    )


class CheckpointConfig(BaseModel):
    """The durable tier."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    num_to_keep: int | None = Field(2, ge=1, description="newest checkpoints kept; null keeps all")
    every_steps: int = Field(0, ge=0, description="steps between durable checkpoints; 0 is only at the end")
