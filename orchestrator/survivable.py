"""What of a run would be left without some of its nodes, as its folder tells: from plans, steps and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from checkpointing.durable import verify
from checkpointing.publish import list_checkpoints
from checkpointing.redundancy import Guard
from orchestrator.runfolder import RunFolder


@dataclass(frozen=True)
class InMemory:
    """The memory tier without some nodes.

    step      the newest that all workers have agreed is held as planned; None when nothing is in memory
    sources   what it would come from, "primary", "copy" and "parity"; empty when a part of it would be lost
    lost_on   nodes on which that part is
    """

    step: int | None
    sources: tuple[str, ...] = ()
    lost_on: tuple[str, ...] = ()

    @property
    def survives(self) -> bool:
        return bool(self.sources)

    def __str__(self) -> str:
        if self.step is None:
            return "nothing is in memory: no driver is at work on this run, or no step was made yet"
        if self.survives:
            return f"step {self.step} survives in memory, from {' and '.join(self.sources)}"
        return f"step {self.step} would be lost in memory: a part of it is on {', '.join(self.lost_on)} only"


def in_memory(folder: RunFolder, lost: tuple[str, ...]) -> InMemory:
    """Raises ValueError when the newest plan has no such node."""
    plans = folder.read_plans()
    if not plans or folder.lease is None or not folder.lease.live:
        return InMemory(None)
    generation = max(plans)
    guards = [_guard(fields) for fields in plans[generation]["guards"]]
    known = sorted({member["node"] for member in plans[generation]["members"]} | {n for g in guards for n in g.nodes})
    unknown = [node for node in lost if node not in known]
    if unknown:
        raise ValueError(f"the run has no node {unknown[0]!r} now; it has {', '.join(known)}")
    held = [line["held_step"] for line in folder.read_metrics() if line["generation"] == generation]
    if not held:
        return InMemory(None)
    sources = {guard: guard.source(lost) for guard in guards}
    missing = [guard for guard, source in sources.items() if source is None]
    if missing:
        return InMemory(held[-1], (), tuple(sorted({node for guard in missing for node in guard.nodes})))
    used = set(sources.values())
    return InMemory(held[-1], tuple(source for source in ("primary", "copy", "parity") if source in used))


def on_storage(folder: RunFolder) -> tuple[list[str], list[str]]:
    """Locations of the checkpoints that are whole by names and sizes, oldest first; and what is wrong with others."""
    whole, damaged = [], []
    for checkpoint in list_checkpoints(folder.location("checkpoints")):
        problems = verify(checkpoint, deep=False)
        damaged += problems
        whole += [] if problems else [checkpoint]
    return whole, damaged


def _guard(fields: dict[str, Any]) -> Guard:
    return Guard(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
