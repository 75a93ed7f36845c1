"""The command line: quick to answer, exit codes that machines can trust, and one sentence for what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from orchestrator.cli import cli, main
from orchestrator.config import JobConfig
from orchestrator.runfolder import RunFolder

ROOT = Path(__file__).parents[2]
JOB = JobConfig.from_dict({"scaling": {"num_workers": 2}, "training": {"max_steps": 5}})


def planaria(*arguments: str, cwd: Path = ROOT, paths: tuple[Path, ...] = (ROOT,)) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "orchestrator", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(str(tmp_path), "run")
    folder.acquire(JOB)
    return folder


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    program = """
import sys
from orchestrator.cli import main
from orchestrator import JobConfig, ScalingConfig
assert main(["--help"]) == 0 and main(["train", "--help"]) == 0
heavy = {"torch", "ray", "pyarrow", "boto3", "pandas"} & sys.modules.keys()
assert not heavy, heavy
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "planaria train" in done.stdout


def commands(group: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, command in group.commands.items():
        found.append((*prefix, name))
        found += commands(command, (*prefix, name)) if hasattr(command, "commands") else []
    return found


@pytest.mark.parametrize("command", commands(cli), ids=" ".join)
def test_every_command_has_help_with_an_example(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Example: planaria" in text or "Not available yet" in text


@pytest.mark.parametrize("command", ["plan", "simulate", "report", "data"])
def test_reserved_commands_say_so(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "job.yaml", "--trace", "t"]) == 2
    assert capsys.readouterr().err == f"planaria: 'planaria {command}' is not available in this version\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train"], "Missing argument 'JOB.yaml'."),
        (["train", "nowhere.yaml"], "nowhere.yaml cannot be read: No such file or directory"),
        (["train", "job.yaml", "--bogus"], "No such option '--bogus'."),
        (["tarin"], "No such command 'tarin'."),
        (["checkpoint", "show", "nobody"], "there is no run in "),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"planaria: {sentence}") and error.count("\n") == 1


def test_a_folder_that_only_has_a_runs_name_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    RunFolder("runs", "docs").acquire(JOB)
    (tmp_path / "docs").mkdir()
    for name in ("docs", "docs/", "runs/docs"):
        assert main(["status", name]) == 0
        assert "run docs" in capsys.readouterr().out


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A trainer that notes what it was asked, and ends as ``trained["error"]`` says."""
    asked: dict[str, Any] = {"error": None}

    class ElasticTrainer:
        def __init__(self, config: JobConfig, folders: Any) -> None:
            asked["config"], asked["folders"] = config, folders

        def run(self, on_step: Any, **options: Any) -> SimpleNamespace:
            asked["options"] = options
            on_step({"message": "starting"})
            on_step({"step": 1, "loss": 2.0, "step_time_s": 0.5, "layout": "dp2", "world_size": 2})
            if isinstance(asked["error"], (ValueError, OSError)):
                raise asked["error"]
            metrics = {"step": 1, "loss": 2.0}
            return SimpleNamespace(path="/x", status="finished", metrics=metrics, incidents=(), error=asked["error"])

    module = ModuleType("orchestrator.trainer")
    module.ElasticTrainer = ElasticTrainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "orchestrator.trainer", module)
    return asked


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.to_yaml())
    return path


def test_train_passes_on_what_was_said(
    job: Path, trained: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.parent)
    said = ["--set", "training.max_steps=7", "--text", "a: b.txt", "--resume", "--address", "host:1", "--json"]
    assert main(["train", str(job), *said]) == 0
    assert trained["config"].training.max_steps == 7
    assert trained["config"].data.text == (str(job.parent / "a: b.txt"),)
    assert trained["options"] == {"resume": True, "address": "host:1"}
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "starting",
        "step   1  loss 2.0000  0.50 s  dp2 on 2 workers",
        "finished at step 1, loss 2.0000, 0 incidents; the run's folder is /x",
    ]
    assert json.loads(printed.out) == {
        "path": "/x",
        "status": "finished",
        "metrics": {"step": 1, "loss": 2.0},
        "error": None,
    }
    assert trained["folders"] == [job.parent]


@pytest.mark.parametrize(
    ("error", "code"),
    [(RuntimeError("it broke"), 1), (ValueError("it is wrong"), 2), (OSError("the disk is full"), 1)],
)
def test_exit_codes_of_train(
    job: Path, trained: dict[str, Any], capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    trained["error"] = error
    assert main(["train", str(job)]) == code
    assert capsys.readouterr().err == f"planaria: {error}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml cannot be read: No such file or directory"),
        (["train", "JOB", "--set", "training.max_step=3"], "training.max_step (value 3) is not a known key; did "),
        (["status", "nowhere"], "there is no run in "),
        (["checkpoint", "verify", "nowhere"], "there is no run in "),
        (["trian"], "No such command 'trian'"),
    ],
)  # fmt: skip
def test_wrong_input_is_exit_code_2(
    arguments: list[str], sentence: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(job) if argument == "JOB" else argument for argument in arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_storage_path_that_is_a_file_is_exit_code_2(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").touch()
    (tmp_path / "text.txt").write_text("a little text\n")
    arguments = ["--set", f"run.storage_path={tmp_path / 'taken'}", "--text", str(tmp_path / "text.txt")]
    assert main(["train", str(job), *arguments]) == 2
    assert capsys.readouterr().err.endswith("taken cannot be used: Not a directory\n")


def test_status_of_a_run_at_work_and_after(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", run.url]) == 0
    assert capsys.readouterr().out.endswith(": running\nno step has been committed yet\n")
    line = {"step": 3, "loss": 2.5, "total_tokens": 10, "layout": "dp2", "world_size": 2, "generation": 1}
    line["goodput"] = 0.5
    run.append_metrics(line)
    run.append_event({"kind": "failure", "incident": 1, "seconds": 1.5, "steps_run_again": 1})
    run.finish("finished")
    assert main(["status", run.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.items() >= {**line, "state": "finished", "incidents": 1, "steps_run_again": 1}.items()
    assert main(["status", run.url]) == 0
    assert "step 3, loss 2.5000, layout dp2 on 2 workers (generation 1), goodput 50.0%" in capsys.readouterr().out


def test_stop_asks_a_driver_that_is_there(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", run.url]) == 0 and run.stop_requested()
    run.finish("stopped")
    assert main(["stop", run.url]) == 1
    assert "no driver is at work on run 'run'" in capsys.readouterr().err


def test_a_run_is_found_by_its_name_under_runs(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "run").rename(tmp_path / "here" / "run")
    (tmp_path / "here").rename(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert main(["status", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "run"


def test_checkpoint_commands_without_checkpoints(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", run.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["checkpoint", "show", run.url, "--step", "3"]) == 2
    assert "has no checkpoint of step 3" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["package", "folder"])
def test_a_folder_of_the_same_name_in_the_way_is_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / ("__init__.py" if kind == "package" else "notes.txt")).touch()
    done = planaria("--help", cwd=tmp_path, paths=(tmp_path, ROOT))
    if kind == "package":
        assert done.returncode == 2
        assert done.stderr.startswith("planaria: package 'workers' must come from ")
        assert f"{tmp_path / 'workers'} is in the way" in done.stderr and done.stderr.count("\n") == 1
    else:
        assert done.returncode == 0, "Python passes over a folder that is no package"
