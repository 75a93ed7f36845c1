"""The ledger: seconds by phase under a clock of our own, and one line per incident."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from checkpointing.layout import Layout
from orchestrator.ledger import PHASES, Ledger
from workers.plan import Member, Plan


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Log:
    metrics: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    plans: dict[int, Any] = field(default_factory=dict)

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        self.metrics.append(dict(line))

    def append_event(self, line: Mapping[str, Any]) -> None:
        self.events.append(dict(line))

    def write_plan(self, generation: int, plan: Mapping[str, Any]) -> None:
        self.plans[generation] = plan


def plan(generation: int, layout: str) -> Plan:
    shape = Layout.parse(layout)
    members = tuple(Member(f"n0/{rank}", "n0", None) for rank in range(shape.size))
    return Plan(generation=generation, layout=shape, members=members, spares=(), step=0, survives=0)


def test_an_incident_is_one_line_with_seconds_by_phase() -> None:
    clock, log = Clock(), Log()
    ledger = Ledger(log, clock=clock, wall=clock)
    before, after = plan(1, "dp4"), plan(2, "dp3")
    ledger.plan(before)
    clock.now += 2
    incident = ledger.incident("failure", "rank 3 died", before, since=clock.now - 0.5, noticed=clock.now)
    assert ledger.open_incident is incident
    for phase, seconds in [("quiesce", 1.0), ("replan", 0.25), ("regroup", 0.125), ("replan", 0.25), ("rework", 2.0)]:
        incident.begin(phase)  # type: ignore[arg-type]
        clock.now += seconds
    incident.add_phase("reshard", 0.75)
    incident.lost(nodes=("n3",), workers=("n3/0",))
    incident.steps_run_again = 1
    ledger.plan(after)
    incident.close(generation=2, layout_after="dp3", source_tier="memory", bytes_moved=9, bytes_lower_bound=8)
    assert ledger.open_incident is None
    line = log.events[-1]
    assert ledger.incidents == [line]
    assert line["phases"] == dict(zip(PHASES, (0.5, 1.0, 0.5, 0.125, 0.75, 2.0), strict=True))
    expected = {
        "time": clock.now,
        "kind": "failure",
        "cause": "rank 3 died",
        "outcome": "recovered",
        "incident": 1,
        "seconds": 4.125,
        "nodes": ["n3"],
        "workers": ["n3/0"],
        "generation_before": 1,
        "generation": 2,
        "layout_before": "dp4",
        "layout_after": "dp3",
        "source_tier": "memory",
        "bytes_moved": 9,
        "bytes_lower_bound": 8,
        "steps_run_again": 1,
    }
    assert line.items() >= expected.items()
    assert list(log.plans) == [1, 2]


def test_a_loss_while_recovering_supersedes_the_incident() -> None:
    log = Log()
    ledger = Ledger(log, clock=Clock(), wall=Clock())
    first = ledger.incident("failure", "a", plan(1, "dp4"), since=100.0, noticed=100.0)
    second = ledger.incident("failure", "b", plan(2, "dp3"), since=100.0, noticed=100.0)
    second.close(generation=2, ended="nothing is left")
    assert [(line["cause"], line["outcome"]) for line in log.events] == [("a", "superseded"), ("b", "ended")]
    with pytest.raises(AssertionError):
        first.close(generation=3)


def test_a_step_run_again_is_not_productive() -> None:
    clock, log = Clock(), Log()
    ledger = Ledger(log, clock=clock, wall=clock)
    for step in (1, 2, 2, 3):
        clock.now += 1
        ledger.step({"kind": "step", "seq": 1, "step": step, "loss": 2.0, "step_time_s": 1.0}, plan(step, "dp2"))
    assert [line["goodput"] for line in log.metrics] == [1.0, 1.0, pytest.approx(2 / 3, abs=1e-4), 0.75]
    assert log.metrics[0] == {
        "time": 101.0, "mfu": None, "step": 1, "loss": 2.0, "step_time_s": 1.0,
        "world_size": 2, "generation": 1, "layout": "dp2", "goodput": 1.0,
    }  # fmt: skip
