"""Ray Train's ``Result`` for an elastic job. Importing Ray Train takes seconds, so only ``fit`` imports this."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas
import ray.train

from checkpointing.publish import list_checkpoints
from checkpointing.storage import join
from orchestrator.callbacks import as_ray
from orchestrator.runfolder import RunFolder
from orchestrator.trainer import JobEnd


@dataclass
class ElasticResult(ray.train.Result):
    """Ray Train's result; ``incidents`` are the run's failures and resizes as events.jsonl has them."""

    incidents: list[dict[str, Any]] = field(default_factory=list)


def as_result(end: JobEnd) -> ElasticResult:
    """``checkpoint`` is the newest committed one; ``metrics_dataframe`` has a row per committed step."""
    checkpoints = list_checkpoints(join(end.path, "checkpoints"))
    return ElasticResult(
        metrics=end.metrics,
        checkpoint=as_ray(checkpoints[-1] if checkpoints else None),
        error=end.error,
        path=end.path,
        metrics_dataframe=pandas.DataFrame(RunFolder.open(end.path).read_metrics()),
        incidents=list(end.incidents),
    )
