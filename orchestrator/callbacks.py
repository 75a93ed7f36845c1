"""Ray Train's ``UserCallback`` in an elastic job: its two methods, called in the driver."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config_sections import RunConfig, ScalingConfig


@dataclass(frozen=True)
class RunContext:
    """What a callback is told of the run; fields as in Ray Train's ``TrainRunContext``, configurations are ours."""

    run_id: str
    run_config: RunConfig
    scaling_config: ScalingConfig

    def get_run_config(self) -> RunConfig:
        return self.run_config


class Callbacks:
    """Calls every callback after each committed step and after each failure.

    ``after_report(run_context, metrics, checkpoint)``: ``metrics`` is a list of one dict, the step's line of
    metrics.jsonl; ``checkpoint`` is one that has been committed since the last call. Checkpoints are written beside
    training, so one belongs to a step before; the last one comes with a last call that repeats the last step's line.
    ``after_exception(run_context, worker_exceptions)``: rank -> what happened, once the job trains again or has ended.
    """

    def __init__(self, callbacks: Sequence[Any], context: RunContext) -> None:
        self._callbacks, self._context = callbacks, context
        self._ranks: dict[int, dict[str, int]] = {}
        self._checkpoint: str | None = None

    def on_step(self, line: dict[str, Any]) -> None:
        checkpoint, self._checkpoint = self._checkpoint, None
        for callback in self._callbacks:
            callback.after_report(self._context, [line], as_ray(checkpoint))

    def on_event(self, event: dict[str, Any]) -> None:
        if event["kind"] == "plan":
            self._ranks[event["generation"]] = {m["worker"]: rank for rank, m in enumerate(event["members"])}
        elif event["kind"] == "checkpoint":
            self._checkpoint = event["path"]  # noticed in the saver's thread, passed on in the driver's
        elif event["kind"] == "failure":
            exceptions = self._exceptions(event)
            for callback in self._callbacks:
                callback.after_exception(self._context, exceptions)

    def finish(self, last: dict[str, Any]) -> None:
        """Pass on a checkpoint that came after the last step."""
        if self._checkpoint is not None and last:
            self.on_step(last)

    def _exceptions(self, incident: dict[str, Any]) -> dict[int, Exception]:
        ranks = self._ranks[incident["generation_before"]]
        lost = {ranks[worker] for worker in incident["workers"] if worker in ranks}
        if not lost:  # a worker that raised and lives on
            lost = {int(number) for number in re.findall(r"^rank (\d+) ", incident["cause"])}
        return {rank: RuntimeError(incident["cause"]) for rank in sorted(lost)}


def as_ray(location: str | None) -> Any:
    """Ray Train's ``Checkpoint`` of one of ours."""
    if location is None:
        return None
    from ray.train import Checkpoint

    base, _, options = location.partition("?")
    known = [
        option for option in options.split("&") if not option.startswith("sse")
    ]  # pyarrow reads, and knows no more
    return Checkpoint("?".join((base, "&".join(known))) if options else base)
