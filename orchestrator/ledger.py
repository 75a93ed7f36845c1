"""The ledger of a run: every line of events.jsonl, metrics.jsonl and plan.json passes through here.

An incident is one line, written when it ends, with the seconds of each phase: lost time can be added up without pairing
lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

Phase = Literal["detect", "quiesce", "replan", "regroup", "reshard", "rework"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Log(Protocol):
    """Where lines go; ``RunFolder`` is one."""

    def append_metrics(self, line: Mapping[str, Any]) -> None: ...

    def append_event(self, line: Mapping[str, Any]) -> None: ...

    def write_plan(self, generation: int, plan: Mapping[str, Any]) -> None: ...


class PlanLike(Protocol):
    """What the ledger reads of ``workers.plan.Plan``."""

    @property
    def generation(self) -> int: ...

    @property
    def layout(self) -> Any: ...

    @property
    def members(self) -> Sequence[Any]: ...

    def as_json(self) -> dict[str, Any]: ...


class Ledger:
    """Adds time and generation to every line, and keeps the incidents of this driver.

    ``on_event`` is given every line of events.jsonl once it is written. ``clock`` measures between two points
    (monotonic seconds); ``wall`` is the time of day (seconds since 1970).
    """

    def __init__(
        self,
        log: Log,
        on_event: Callable[[dict[str, Any]], None] = lambda line: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.clock, self.wall = clock, wall
        self.incidents: list[dict[str, Any]] = []
        self._log = log
        self._on_event = on_event
        self._generation = 0
        self._started = clock()
        self._productive_s = 0.0
        self._last_step = 0
        self._open: Incident | None = None

    @property
    def open_incident(self) -> Incident | None:
        """The incident that has not seen its first good step yet."""
        return self._open

    @property
    def elapsed_s(self) -> float:
        """Seconds since this driver began."""
        return self.clock() - self._started

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Write one line to events.jsonl and return it. ``fields`` are plain JSON."""
        line = {"time": self.wall(), "generation": self._generation, "kind": kind, **fields}
        self._log.append_event(line)
        self._on_event(line)
        return line

    def plan(self, plan: PlanLike) -> None:
        """Note the plan of the generation that begins."""
        self._generation = plan.generation
        self._log.write_plan(plan.generation, plan.as_json())
        self.event("plan", **{key: value for key, value in plan.as_json().items() if key != "generation"})

    def step(self, report: Mapping[str, Any], plan: PlanLike) -> dict[str, Any]:
        """Write and return the line of one committed step; ``report`` is a worker's, with step, step_time_s and more.

        ``goodput`` is the share of this driver's time so far that went into steps committed for the first time.
        """
        if report["step"] > self._last_step:
            self._last_step = report["step"]
            self._productive_s += report["step_time_s"]
        measured = {key: value for key, value in report.items() if key not in ("kind", "seq", "durable")}
        line = {
            "time": self.wall(),
            "mfu": None,  # known only where the device's peak is
            **measured,
            "world_size": len(plan.members),
            "generation": plan.generation,
            "layout": str(plan.layout),
            "goodput": round(self._productive_s / max(self.elapsed_s, self._productive_s, 1e-9), 4),
        }
        self._log.append_metrics(line)
        return line

    def incident(self, kind: str, cause: str, plan: PlanLike, *, since: float, noticed: float) -> Incident:
        """Open an incident that hit ``plan``; ``since``: time of day of its first sign, ``noticed``: of its detection.

        One that is still open was overtaken by this one (a loss while recovering) and ends here as "superseded".
        """
        if self._open is not None:
            self._open.supersede()
        self._open = Incident(self, kind, cause, plan, since, noticed)
        return self._open

    def _close(self, incident: Incident, line: Mapping[str, Any]) -> None:
        assert incident is self._open, "an incident ends once"
        self._open = None
        self.incidents.append(self.event(incident.kind, incident=len(self.incidents) + 1, **line))


class Incident:
    """One failure or membership change, from its first sign to the first good step after it.

    A stop-watch over the phases, and what had to be moved and run again.
    """

    def __init__(self, ledger: Ledger, kind: str, cause: str, plan: PlanLike, since: float, noticed: float) -> None:
        self.kind = kind
        self.steps_run_again = 0
        self._ledger = ledger
        self._cause = cause
        self.since = since
        self._before = (plan.generation, str(plan.layout))
        self._nodes: tuple[str, ...] = ()
        self._workers: tuple[str, ...] = ()
        self._phases: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._running: tuple[Phase, float] | None = None
        self.add_phase("detect", max(0.0, noticed - since))

    def begin(self, phase: Phase) -> None:
        """End the phase that runs and begin ``phase``; the last one ends with the incident."""
        self._end()
        self._running = (phase, self._ledger.clock())

    def _end(self) -> None:
        if self._running is not None:
            phase, began = self._running
            self.add_phase(phase, self._ledger.clock() - began)
            self._running = None

    def add_phase(self, phase: Phase, seconds: float) -> None:
        """Add seconds that were measured elsewhere, by a worker for example."""
        self._phases[phase] += seconds

    def lost(self, *, nodes: Sequence[str], workers: Sequence[str]) -> None:
        """Name what the incident took away."""
        self._nodes, self._workers = tuple(nodes), tuple(workers)

    def close(
        self,
        *,
        generation: int,
        ended: str | None = None,
        layout_after: str | None = None,
        num_workers: int | None = None,
        source_tier: str | None = None,
        bytes_moved: int = 0,
        bytes_lower_bound: int = 0,
    ) -> None:
        """Write the incident's line, once: after the first good step of ``generation``, or when the job ends by it.

        ``ended`` says why the job ends; ``source_tier`` is where the state came from ("memory", "disk", "init").
        """
        self._write(
            outcome="recovered" if ended is None else "ended",
            ended=ended,
            generation=generation,
            layout_after=layout_after,
            num_workers=num_workers,
            source_tier=source_tier,
            bytes_moved=bytes_moved,
            bytes_lower_bound=bytes_lower_bound,
        )

    def supersede(self) -> None:
        """End the incident because another one came before the first good step."""
        self._write(outcome="superseded")

    def _write(self, **outcome: Any) -> None:
        self._end()
        generation, layout = self._before
        line = {
            "cause": self._cause,
            "since": self.since,
            "nodes": list(self._nodes),
            "workers": list(self._workers),
            "generation_before": generation,
            "layout_before": layout,
            "phases": {phase: round(seconds, 6) for phase, seconds in self._phases.items()},
            "seconds": round(self._ledger.wall() - self.since, 6),
            "steps_run_again": self.steps_run_again,
        }
        self._ledger._close(self, line | outcome)
