"""``ray job submit`` on a cluster that was started with ``ray start --head``: both forms, its log, its exit codes."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.orchestrator.ray_jobs import (
    PACKAGES,
    ROOT,
    Head,
    copy_packages,
    head_node,
    make_environment,
    processes_of,
)

# A user's own model, which also tells from where each worker has imported our packages.
MODEL = """
import json, os, pathlib
import checkpointing, orchestrator, pipelines, workers
from torch import nn

def build(vocab_size, seq_len):
    places = [str(pathlib.Path(m.__file__).parent) for m in (checkpointing, orchestrator, pipelines, workers)]
    pathlib.Path(os.environ["HOME"], f"{NAME}-{os.getpid()}.json").write_text(json.dumps(places))
    return nn.Sequential(nn.Embedding(vocab_size, 16), nn.Linear(16, vocab_size))
"""
BROKEN = """
from torch import nn

class Broken(nn.Embedding):
    def forward(self, tokens):
        raise RuntimeError("this model is broken")

def build(vocab_size, seq_len):
    return Broken(vocab_size, vocab_size)
"""
JOB = """
run: {name: NAME, storage_path: runs}
scaling: {num_workers: WORKERS, resources_per_worker: {CPU: 0.5}, standbys_per_node: 0}
model: own:build
data: {text: text, seq_len: 32, vocab_size: 300, num_readers: 1}
training: {max_steps: 4, global_batch_rows: 4}
orphan_grace_s: 5.0
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    make_environment(folder)
    return folder


@pytest.fixture(scope="module")
def head(environment: Path) -> Iterator[Head]:
    with head_node(environment, num_cpus=8) as head:
        yield head
    assert not processes_of(head.home.parent)


def make_project(folder: Path, name: str, workers: int, model: str = MODEL) -> Path:
    """A user's folder: a job with this run name, some text, and a model of their own."""
    (folder / "job.yaml").write_text(JOB.replace("NAME", name).replace("WORKERS", str(workers)))
    (folder / "own.py").write_text(model.replace("{NAME}", name))
    shutil.copytree(ROOT / "pipelines", folder / "text")
    return folder


def log_of(output: str) -> list[str]:
    """What the job itself wrote, of all that ``ray job submit`` prints (its own lines start with the date)."""
    written = re.split(r"Running entrypoint for job .*\n", output)[1]
    return re.split(r"^\S+ \S+\t[A-Z]+ ", written, maxsplit=1, flags=re.MULTILINE)[0].splitlines()


def metrics(head: Head, name: str) -> list[dict[str, Any]]:
    path = head.home / "runs" / name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("form", ["planaria", "python -m orchestrator"])
def test_both_forms_train(form: str, head: Head, environment: Path, tmp_path: Path) -> None:
    """Planaria installed on the cluster; and the code of the upload, which has precedence over what is installed."""
    name = form.split()[-1]
    project = make_project(tmp_path, name, workers=2)
    if form != "planaria":
        copy_packages(project)
    done = head.ray("job", "submit", "--working-dir", ".", "--", *form.split(), "train", "job.yaml", cwd=project)
    assert done.returncode == 0, done.stdout
    lines = log_of(done.stdout)
    assert lines[0] == f"starting run '{name}' in {head.home}/runs/{name}"
    assert lines[1] == "starting the workers, and waiting until they are warm"
    assert lines[2].startswith("dp2 on 2 workers; memory survives the loss of worker processes only")
    assert re.fullmatch(r"step   1  loss \d\.\d{4}  \d+\.\d\d s  dp2 on 2 workers", lines[3])
    end = rf"finished at step 4, loss \d\.\d{{4}}, 0 incidents; the run's folder is {head.home}/runs/{name}"
    assert any(re.fullmatch(end, line) for line in lines), lines
    assert len(lines) < 20 and not any("Traceback" in line for line in lines)
    assert [line["step"] for line in metrics(head, name)] == [1, 2, 3, 4]
    told = [json.loads(path.read_text()) for path in head.home.glob(f"{name}-*.json")]
    assert len(told) == 2, "one note per worker process"
    for places in told:
        assert [Path(place).name for place in places] == sorted(PACKAGES)
        (home,) = {Path(place).parent for place in places}
        installed = home.is_relative_to(environment)
        assert installed == (form == "planaria"), home


def test_a_folder_in_the_way_is_refused(head: Head, tmp_path: Path) -> None:
    project = make_project(tmp_path, "in-the-way", workers=1)
    (project / "workers").mkdir()
    (project / "workers" / "__init__.py").touch()
    done = head.ray("job", "submit", "--working-dir", ".", "--", "planaria", "train", "job.yaml", cwd=project)
    assert done.returncode == 1  # of ``ray job submit``; the job's own is in its message
    assert "failed with exit code 2" in done.stdout
    (sentence,) = [line for line in log_of(done.stdout) if line.startswith("planaria: ")]
    assert re.match(r"planaria: package 'workers' must come from .*, but .*/workers is in the way", sentence)


def test_a_job_that_cannot_go_on_fails(head: Head, tmp_path: Path) -> None:
    project = make_project(tmp_path, "broken", workers=1, model=BROKEN)
    done = head.ray("job", "submit", "--working-dir", ".", "--", "planaria", "train", "job.yaml", cwd=project)
    assert done.returncode == 1 and "failed with exit code 1" in done.stdout
    lines = log_of(done.stdout)
    incidents = [line for line in lines if line.startswith("incident ")]
    assert len(incidents) == 3 and all("this model is broken" in line for line in incidents), lines
    assert any(line.startswith("planaria: ") and "this model is broken" in line for line in lines)
    assert not any("Traceback" in line for line in lines)


def test_stop_leads_to_a_checkpoint_and_a_clean_end(head: Head, tmp_path: Path) -> None:
    project = make_project(tmp_path, "stopped", workers=1)
    patience = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}})
    options = ["--working-dir", ".", "--submission-id", "stopped", "--no-wait", "--runtime-env-json", patience]
    command = ["planaria", "train", "job.yaml", "--set", "training.max_steps=1000000"]
    submitted = head.ray("job", "submit", *options, "--", *command, cwd=project)
    assert submitted.returncode == 0, submitted.stdout
    wait_until(lambda: bool(metrics(head, "stopped")))
    assert head.ray("job", "stop", "stopped").returncode == 0
    log = head.ray("job", "logs", "stopped").stdout
    reached = metrics(head, "stopped")[-1]["step"]
    assert f"stopped at step {reached}, " in log
    run = head.home / "runs" / "stopped"
    assert (run / "checkpoints" / f"step-{reached:08d}" / "COMMITTED").exists()
    (lease,) = sorted((run / "lease").iterdir())[-1:]
    assert json.loads(lease.read_text())["status"] == "stopped"


def test_the_token_is_needed_and_may_come_from_a_file(head: Head, tmp_path: Path) -> None:
    without = head.ray("job", "list", RAY_AUTH_TOKEN="", RAY_AUTH_TOKEN_PATH="")
    assert without.returncode != 0
    token = tmp_path / "token"
    token.write_text(head.environment["RAY_AUTH_TOKEN"])
    given = head.ray("job", "list", RAY_AUTH_TOKEN="", RAY_AUTH_TOKEN_PATH=str(token))
    assert given.returncode == 0, given.stdout


def wait_until(condition: Any, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
