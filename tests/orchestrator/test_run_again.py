"""The same run driven several times, by real `planaria train` processes: stopped, interrupted, resumed, refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointing.publish import step_of
from orchestrator.cli import main
from orchestrator.local_cluster import LocalCluster
from tests.orchestrator.jobs import Drive, assert_every_step_once, job, wait_until, write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("again")
    write_text(folder)
    return folder


class Train:
    """`planaria train` on one job file, in this process or as a driver of its own."""

    def __init__(self, folder: Path, cluster: LocalCluster) -> None:
        config = job(folder, "again", "training.max_steps=100000")
        self.file = folder / "job.yaml"
        self.file.write_text(config.to_yaml())
        self.drive = Drive(config, cluster)
        self._address = cluster.address

    def arguments(self, *options: str) -> list[str]:
        return ["train", str(self.file), "--address", self._address, *options]

    def start(self, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator", *self.arguments(*options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )

    def wait_for_steps(self, driver: subprocess.Popen[str], count: int) -> None:
        """Until the run has made ``count`` more steps than now."""
        before = len(self.drive.metrics)
        wait_until(lambda: len(self.drive.metrics) >= before + count or driver.poll() is not None)
        assert driver.poll() is None, driver.communicate()

    @property
    def last_step(self) -> int:
        return self.drive.metrics[-1]["step"]


def end_of(driver: subprocess.Popen[str]) -> tuple[int, str]:
    output, errors = driver.communicate(timeout=120)
    return driver.returncode, output + errors


def test_stop_interrupt_resume_and_what_is_refused(
    folder: Path, cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    train = Train(folder, cluster)
    drive = train.drive

    def refused(*options: str) -> str:
        capsys.readouterr()
        assert main(train.arguments(*options)) == 2
        return capsys.readouterr().err

    driver = train.start()
    train.wait_for_steps(driver, 5)
    assert "run 'again' is being driven from" in refused()
    assert main(["stop", drive.folder.url]) == 0
    code, output = end_of(driver)
    assert code == 0, output
    assert [step_of(path) for path in drive.checkpoints] == [train.last_step]
    assert main(["stop", drive.folder.url]) == 1, "nobody is there to stop"

    driver = train.start()
    train.wait_for_steps(driver, 5)
    driver.send_signal(signal.SIGINT)
    code, output = end_of(driver)
    assert code == 0, output
    assert step_of(drive.checkpoints[-1]) == train.last_step
    assert "optimizer.lr" in refused("--set", "optimizer.lr=0.5")

    end = train.last_step + 10
    driver = train.start("--set", f"training.max_steps={end}")
    code, output = end_of(driver)
    assert code == 0, output
    assert "--resume" in refused("--set", f"training.max_steps={end}")

    end += 10
    driver = train.start("--set", f"training.max_steps={end}", "--resume")
    code, output = end_of(driver)
    assert code == 0, output
    assert step_of(drive.checkpoints[-1]) == end
    assert [event["step"] for event in drive.events("resumed")] == sorted(
        event["step"] for event in drive.events("ended")[:-1]
    )

    straight = Drive(job(folder, "straight", f"training.max_steps={end}"), cluster)
    assert straight.run().error is None
    assert_every_step_once(drive.metrics, end)
    same = ("step", "batch_digest", "loss", "grad_norm", "lr", "total_tokens")
    for line, expected in zip(drive.metrics, straight.metrics, strict=True):
        assert {key: line[key] for key in same} == {key: expected[key] for key in same}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["scaling.num_workers=64", "layout=dp12"], "the job needs at least 64 workers"),
        (["scaling.num_workers=[12, 64]", "layout=dp12"], "the cluster has room for 8 (2 on "),
        (["layout=tp3", "scaling.num_workers=3"], "tp3, which does not divide model.num_heads=4"),
        (["data.text=/nowhere"], "/nowhere"),
        (["trainig.max_steps=5"], "training"),
    ],
)
def test_refusals_before_anything_starts(
    settings: list[str],
    sentence: str,
    tmp_path: Path,
    folder: Path,
    cluster: LocalCluster,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, one sentence; no run folder, no actor."""
    write_text(tmp_path)
    (tmp_path / "job.yaml").write_text(job(tmp_path, "refused").to_yaml())
    options = [part for setting in settings for part in ("--set", setting)]
    assert main(["train", str(tmp_path / "job.yaml"), "--address", cluster.address, *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not list(tmp_path.glob("runs/*"))
