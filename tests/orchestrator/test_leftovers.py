"""A driver that is killed: its actors end themselves when nobody has renewed their leases, and leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.local_cluster import LocalCluster
from tests.orchestrator.jobs import Drive, job, left_behind, wait_until, write_text


@pytest.mark.parametrize("ends", ["killed", "interrupted twice"])
def test_a_driver_that_ends_at_once_leaves_nothing(ends: str, tmp_path: Path, cluster: LocalCluster) -> None:
    write_text(tmp_path)
    shape = ("scaling={num_workers: 2, standbys_per_node: 1}", "layout=dp2", "training.max_steps=100000")
    config = job(tmp_path, "orphan", *shape)
    (tmp_path / "job.yaml").write_text(config.to_yaml())
    drive = Drive(config, cluster)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    shared_before = set(os.listdir("/dev/shm"))
    driver = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "train", str(tmp_path / "job.yaml"), "--address", cluster.address],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "TMPDIR": str(temporary)},
    )
    wait_until(lambda: len(drive.metrics) >= 3 or driver.poll() is not None)
    assert driver.poll() is None
    if ends == "killed":
        driver.kill()
        driver.wait()
        assert drive.folder.lease is not None and not drive.folder.lease.live, "its death is seen at once"
    else:
        driver.send_signal(signal.SIGINT)
        time.sleep(0.05)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(timeout=60) in (0, 1)
    began = time.monotonic()
    assert left_behind(cluster) == []
    assert time.monotonic() - began < config.orphan_grace_s + 8
    assert set(os.listdir("/dev/shm")) <= shared_before
    assert list(temporary.iterdir()) == []
