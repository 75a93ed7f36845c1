"""The ledger of a run: every line of events.jsonl and metrics.jsonl passes through here.

An incident is written as one line when it ends, with the seconds of each phase, so that lost time can be added up
without pairing lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, get_args

Phase = Literal["detect", "quiesce", "replan", "regroup", "reshard", "rework"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Log(Protocol):
    """Where lines go; ``RunFolder`` is one."""

    def append_metrics(self, line: Mapping[str, Any]) -> None: ...

    def append_event(self, line: Mapping[str, Any]) -> None: ...


class Ledger:
    """Adds the time to every line, and counts incidents.

    ``clock`` measures seconds between two points (monotonic); ``wall`` is the time since 1970 that lines carry.
    """

    def __init__(
        self, log: Log, *, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self.clock = clock
        self._log = log
        self._wall = wall
        self.incidents: list[dict[str, Any]] = []

    def event(self, kind: str, *, generation: int, **fields: Any) -> dict[str, Any]:
        """Write one line to events.jsonl and return it. ``fields`` are plain JSON."""
        line = {"time": self._wall(), "generation": generation, "kind": kind, **fields}
        self._log.append_event(line)
        return line

    def metrics(self, *, step: int, generation: int, **fields: Any) -> None:
        """Write the line of one committed step to metrics.jsonl."""
        self._log.append_metrics({"time": self._wall(), "step": step, "generation": generation, **fields})

    def incident(self, kind: str, *, generation: int, cause: str, nodes: Sequence[str], detect_s: float) -> Incident:
        """Open an incident that was noticed now, ``detect_s`` seconds after the last good sign.

        ``generation`` is the one that it hit; ``kind`` for example "worker_lost", "node_lost" or "node_joined".
        """
        return Incident(self, kind, generation, cause, tuple(nodes), detect_s)

    def close(self, incident: Incident, generation: int, outcome: str, fields: Mapping[str, Any]) -> None:
        line = self.event(
            incident.kind,
            generation=generation,
            incident=len(self.incidents),
            outcome=outcome,
            cause=incident.cause,
            nodes=list(incident.nodes),
            generation_before=incident.generation,
            phases={name: round(seconds, 6) for name, seconds in incident.phases.items()},
            seconds=round(sum(incident.phases.values()), 6),
            **fields,
        )
        self.incidents.append(line)


class Incident:
    """A stop-watch over the phases of one incident, and what it moved."""

    def __init__(
        self, ledger: Ledger, kind: str, generation: int, cause: str, nodes: tuple[str, ...], detect_s: float
    ) -> None:
        self.kind = kind
        self.generation = generation
        self.cause = cause
        self.nodes = nodes
        self.phases: dict[Phase, float] = {name: 0.0 for name in PHASES}
        self.phases["detect"] = detect_s
        self._ledger = ledger
        self._running: tuple[Phase, float] | None = None
        self._closed = False

    def begin(self, phase: Phase) -> None:
        """End the phase that runs, if any, and begin ``phase``; a phase that is entered twice adds up."""
        self._end()
        self._running = (phase, self._ledger.clock())

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Time one block. The seconds count also when it fails."""
        self.begin(phase)
        try:
            yield
        finally:
            self._end()

    def close(
        self,
        generation: int,
        *,
        bytes_moved: int,
        bytes_lower_bound: int,
        source_tier: str | None,
        layout_before: str,
        layout_after: str | None,
        steps_again: int,
        outcome: str = "recovered",
    ) -> None:
        """Write the incident's line, once, after the first good step of ``generation`` (or when recovery is given up).

        ``source_tier``   where the state came from: "device", "memory", "checkpoint", or None when nothing moved
        ``steps_again``   committed steps that had to be run again
        ``outcome``       "recovered", "superseded" (a further loss while recovering) or "failed"
        """
        assert not self._closed, "an incident ends once"
        self._end()
        self._closed = True
        moved = {
            "bytes_moved": bytes_moved,
            "bytes_lower_bound": bytes_lower_bound,
            "source_tier": source_tier,
            "layout_before": layout_before,
            "layout_after": layout_after,
            "steps_again": steps_again,
        }
        self._ledger.close(self, generation, outcome, moved)

    def _end(self) -> None:
        if self._running is not None:
            phase, began = self._running
            self.phases[phase] += self._ledger.clock() - began
            self._running = None
