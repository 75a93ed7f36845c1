"""The driver of a training job. Public names are imported when they are first used, so that this import is cheap."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpointing.config import CheckpointConfig
    from orchestrator.config import JobConfig
    from orchestrator.config_sections import FailureConfig, RunConfig, ScalingConfig, WorkerGroupConfig
    from orchestrator.trainer import ElasticTrainer

_HOMES = {
    "CheckpointConfig": "checkpointing.config",
    "ElasticTrainer": "orchestrator.trainer",
    "FailureConfig": "orchestrator.config_sections",
    "JobConfig": "orchestrator.config",
    "RunConfig": "orchestrator.config_sections",
    "ScalingConfig": "orchestrator.config_sections",
    "WorkerGroupConfig": "orchestrator.config_sections",
}

__all__ = [
    "CheckpointConfig",
    "ElasticTrainer",
    "FailureConfig",
    "JobConfig",
    "RunConfig",
    "ScalingConfig",
    "WorkerGroupConfig",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'orchestrator' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
