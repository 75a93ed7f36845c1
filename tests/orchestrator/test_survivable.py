"""``planaria checkpoint survive``, and what a driver says of how much it survives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointing.config import ProtectionConfig
from checkpointing.layout import Layout
from checkpointing.schema import Schema, TensorSpec
from orchestrator.cli import main
from orchestrator.progress import event_line
from orchestrator.recovery import Source, plan_generation
from orchestrator.runfolder import RunFolder
from tests.checkpointing.node_keepers import save_checkpoint
from tests.orchestrator.test_runfolder import JOB
from workers.plan import Plan

SCHEMA = Schema(tuple(TensorSpec(f"w{index}", (12, 8), "float32", None, "first") for index in range(12)), 1)
Ask = Callable[[str], tuple[int, dict[str, Any]]]


def plan(scheme: str, survive: int, num_nodes: int = 6) -> Plan:
    names = [f"n{index}" for index in range(num_nodes)]
    upcoming = plan_generation(
        generation=1,
        schema=SCHEMA,
        source=Source.fresh(),
        preferred=(Layout(dp=num_nodes),),
        is_possible=lambda layout: True,
        workers={f"{name}/0": name for name in names},
        domains={name: name for name in names},
        protection=ProtectionConfig(survive=survive, scheme=scheme),  # type: ignore[arg-type]
        memory={},
        previous=None,
    )
    assert upcoming is not None
    return upcoming.plan


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(str(tmp_path), "run")
    made.acquire(JOB)
    return made


@pytest.fixture
def ask(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> Ask:
    def run(nodes: str) -> tuple[int, dict[str, Any]]:
        code = main(["checkpoint", "survive", folder.url, "--lose", nodes, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def begin(folder: RunFolder, planned: Plan, held_step: int) -> None:
    folder.write_plan(planned.generation, planned.as_json())
    folder.append_metrics({"step": held_step + 1, "generation": planned.generation, "held_step": held_step})
    folder.flush(force=True)


@pytest.mark.parametrize(("scheme", "role"), [("replica", "copy"), ("parity", "parity")])
def test_memory_is_asked_first_and_checkpoints_are_left_beyond_it(
    folder: RunFolder, ask: Ask, scheme: str, role: str
) -> None:
    begin(folder, plan(scheme, 2), held_step=41)
    code, said = ask("n0,n1")
    assert code == 0 and said["memory"] == {"step": 41, "sources": ["primary", role], "lost_on": []}
    code, said = ask("n0,n1,n2")
    assert code == 1 and said["memory"]["sources"] == [] and {"n0", "n1", "n2"} <= set(said["memory"]["lost_on"])
    save_checkpoint(folder.location("checkpoints"), 40, Layout.parse("dp2"))
    code, said = ask("n0,n1,n2")
    assert code == 0 and [place["step"] for place in said["checkpoints"]] == [40] and said["damaged"] == []


def test_a_damaged_checkpoint_is_named_and_does_not_count(folder: RunFolder, ask: Ask) -> None:
    made = save_checkpoint(folder.location("checkpoints"), 40, Layout.parse("dp2"))
    next(Path(made).rglob("*.safetensors")).unlink()
    code, said = ask("n0")
    assert code == 1 and said["checkpoints"] == [] and "is missing" in said["damaged"][0]


def test_a_run_without_a_driver_has_nothing_in_memory(
    folder: RunFolder, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(folder, plan("replica", 1), held_step=3)
    assert ask("n0")[0] == 0
    folder.finish("failed")
    code, said = ask("n0")
    assert code == 1 and said["memory"] == {"step": None, "sources": [], "lost_on": []}
    assert main(["checkpoint", "survive", folder.url, "--lose", "n0"]) == 1
    said_plainly = capsys.readouterr().out
    assert "nothing is in memory: no driver is at work" in said_plainly and "no step would survive" in said_plainly


def test_an_unknown_node_is_refused_with_those_there_are(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    begin(folder, plan("replica", 1), held_step=3)
    assert main(["checkpoint", "survive", folder.url, "--lose", "n0,n9"]) == 2
    assert "has no node 'n9' now; it has n0, n1, n2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_nodes", "survive", "sentence"),
    [
        (1, 1, "survives the loss of worker processes only: copies need a second node"),
        (2, 1, "survives the loss of any one node"),
        (2, 2, "survives the loss of any one node (2 asked for, which takes more failure domains)"),
        (3, 2, "survives the loss of any 2 nodes"),
    ],
)
def test_the_start_line_says_what_is_survived(num_nodes: int, survive: int, sentence: str) -> None:
    line = event_line({"kind": "plan", **plan("auto", survive, num_nodes).as_json()})
    assert line is not None and line.endswith(sentence)
