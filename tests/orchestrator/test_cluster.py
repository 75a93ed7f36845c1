"""Addresses that lead nowhere are a sentence, in seconds."""

from __future__ import annotations

import socket

import pytest
import ray

from orchestrator.cluster import connect
from orchestrator.progress import event_line


def test_an_address_at_which_nobody_answers() -> None:
    with socket.socket() as taken:  # bound but not listening: nobody can answer here
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"no Ray cluster answers at {address}"), connect(address):
            pass


def test_a_local_ray_that_does_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray does: no class of its own

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConnectionError, match="^Ray did not start in time"), connect("local"):
        pass


def test_an_incident_after_which_the_job_was_stopped_is_told_without_a_layout() -> None:
    line = {"kind": "failure", "incident": 1, "nodes": [], "workers": ["node-1/0"], "layout_before": "dp2"}
    line |= {"outcome": "recovered", "ended": None, "layout_after": None, "num_workers": None, "seconds": 1.0}
    assert event_line(line) == "incident 1, failure (lost node-1/0): no step was made after it"


def test_a_dashboard_is_not_a_cluster() -> None:
    with pytest.raises(ValueError, match="is the dashboard of a Ray cluster"), connect("http://127.0.0.1:8265"):
        pass
