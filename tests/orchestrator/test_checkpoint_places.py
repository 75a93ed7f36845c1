"""What ``planaria checkpoint`` reads and where it writes: names, places that are kept, commands that are stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointing.durable import verify
from checkpointing.layout import Layout
from orchestrator.cli import main
from orchestrator.config import JobConfig
from orchestrator.runfolder import RunFolder
from tests.checkpointing.node_keepers import save_checkpoint

JOB = JobConfig.from_dict({"scaling": {"num_workers": 2}, "training": {"max_steps": 5}})
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with checkpoints of steps 4 and 9."""
    RunFolder(str(tmp_path), "run").acquire(JOB)
    for step in (4, 9):
        save_checkpoint(str(tmp_path / "run" / "checkpoints"), step, Layout(dp=2))
    return tmp_path / "run"


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_checkpoint_outside_of_runs_is_shown_and_verified(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB.to_yaml())  # where people keep it: that makes no run
    assert main(["checkpoint", "reshard", "run@4", "r1", "--layout", "tp2"]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "show", "r1/step-00000004", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == "tp2"
    assert main(["checkpoint", "verify", "r1/step-00000004"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/r1/step-00000004: whole\n"
    assert main(["checkpoint", "verify", "run@9"]) == 0
    assert capsys.readouterr().out == f"{run}/checkpoints/step-00000009: whole\n"
    assert main(["checkpoint", "verify", "r1/step-00000004", "--step", "4"]) == 2
    assert "is one checkpoint; --step is for a run" in capsys.readouterr().err
    (tmp_path / "r1" / "step-00000004" / "manifest.json").unlink()
    assert main(["checkpoint", "verify", "r1/step-00000004"]) == 1
    assert "manifest.json is missing" in capsys.readouterr().out


def test_a_path_that_exists_comes_before_a_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run / "checkpoints" / "step-00000009", run.with_name("run@4"))
    assert main(["checkpoint", "show", str(run.with_name("run@4")), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 9
    run.with_name("run@9").mkdir()
    assert main(["checkpoint", "show", f"{run}@9"]) == 2
    assert f"there is no run in {run}@9" in capsys.readouterr().err
    assert main(["checkpoint", "show", f"{run}@{'4' * 5000}"]) in (1, 2)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("run", "in the run's folder"),
        ("run/checkpoints", "in the run's folder"),
        ("run/checkpoints/step-00000004", "in the checkpoint"),
        ("lnk", "in the run's folder"),
        ("lnk/deeper", "in the run's folder"),
        ("copy", "in the checkpoint"),
        ("copy/data", "in the checkpoint"),
        ("copy/new/folder", "in the checkpoint"),
    ],
)
def test_what_is_kept_is_not_written_into(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, reason: str
) -> None:
    shutil.copytree(run / "checkpoints" / "step-00000009", tmp_path / "copy")
    (tmp_path / "lnk").symlink_to(run / "checkpoints")
    (run / "checkpoints" / ".step-00000009.deadbeef.tmp").mkdir()
    before = contents(tmp_path)
    assert main(["checkpoint", "reshard", str(run), str(tmp_path / target), "--layout", "dp3"]) == 2
    assert reason in capsys.readouterr().err and contents(tmp_path) == before


@pytest.mark.parametrize("target", ["", "file://out", "~nobody-here/x"])
def test_what_is_no_place_is_not_written_into(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    assert main(["checkpoint", "reshard", str(run), target, "--layout", "dp3"]) == 2
    assert main(["checkpoint", "diff", target, str(run)]) == 2
    assert contents(tmp_path / "cwd") == set()


def test_a_file_uri_is_decoded(run: Path, tmp_path: Path) -> None:
    assert main(["checkpoint", "reshard", f"{run.as_uri()}@4", f"{tmp_path.as_uri()}/a%20b", "--layout", "dp3"]) == 0
    assert verify(str(tmp_path / "a b" / "step-00000004"), deep=True) == ()


STOPPED = """
import os, signal, sys
from checkpointing import rewrite
from orchestrator.cli import main
whole = rewrite.write_share
def stop(*arguments):
    os.kill(os.getpid(), int(sys.argv[1]))
    return whole(*arguments)
rewrite.write_share = stop
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_reshard_leaves_nothing(run: Path, tmp_path: Path, number: signal.Signals) -> None:
    before = contents(tmp_path)
    command = ["checkpoint", "reshard", str(run), str(tmp_path / "new" / "deep"), "--layout", "dp3"]
    stopped = subprocess.run(
        [sys.executable, "-c", STOPPED, str(number.value), *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (stopped.returncode, stopped.stderr.strip()) == (1, "planaria: interrupted")
    assert contents(tmp_path) == before
