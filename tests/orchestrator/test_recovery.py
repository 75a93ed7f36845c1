"""Jobs on four real Ray nodes that lose workers and nodes on the way, held against runs that lose none."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from orchestrator.local_cluster import LocalCluster
from tests.orchestrator.jobs import (
    REFERENCE_STEPS,
    Drive,
    Line,
    assert_bitwise_equal,
    assert_every_step_once,
    assert_same_course,
    job,
    kill,
    phases,
    write_text,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recovery")
    write_text(folder)
    return folder


@pytest.mark.timeout(600)  # it waits for workers to start three times, which takes minutes on a busy machine
def test_a_lost_node_is_survived_under_another_layout_and_regrown_without_losing_a_step(
    folder: Path, cluster: LocalCluster, reference: list[Line]
) -> None:
    config = job(
        folder,
        "node",
        "scaling.num_workers=[4, 8]",
        "layout=[dp2.tp2.pp2, dp3.pp2, dp2.pp2]",
        f"training.max_steps={REFERENCE_STEPS}",
    )
    drive = Drive(config, cluster)
    since_regrown = 0
    lost: list[str] = []

    def on_step(line: Line) -> None:
        nonlocal since_regrown
        if line["step"] == 5 and not lost:  # the step may be run again
            assert not drive.checkpoints
            lost.append(drive.mortal[-1])
            cluster.kill_node(drive.cluster_node(lost[0]))
        if line["world_size"] == 6 and line["step"] >= 8 and not drive.events("came_back"):
            cluster.add_nodes(1)
            drive.folder.append_event({"kind": "came_back"})
        since_regrown += line["world_size"] == 8 and bool(drive.events("came_back"))
        if since_regrown == 5:
            assert not drive.checkpoints, "recovery touches no disk"
            drive.folder.request_stop()

    end = drive.run(on_step)
    assert end.error is None
    metrics = drive.metrics
    assert_every_step_once(metrics, metrics[-1]["step"])
    assert_same_course(metrics, reference)
    failure, resize = drive.incidents
    print(phases(failure), phases(resize), len(metrics), sep="\n")
    assert (failure["kind"], failure["layout_before"], failure["layout_after"]) == (
        "failure",
        "pp2·dp2·tp2",
        "pp2·dp3",
    )
    assert failure["nodes"] == lost and failure["steps_run_again"] <= 1
    assert (resize["kind"], resize["layout_after"], resize["steps_run_again"]) == ("resize", "pp2·dp2·tp2", 0)
    for incident in (failure, resize):
        assert incident["source_tier"] == "memory"
        assert incident["bytes_moved"] == incident["bytes_lower_bound"] > 0
    assert not drive.events("fallback")


def test_a_killed_and_a_hung_worker_are_replaced_in_place_bit_by_bit(folder: Path, cluster: LocalCluster) -> None:
    """Two nodes, two workers and a warm standby each; every rank's boxes are held by a replica."""
    shape = ("scaling={num_workers: 4, standbys_per_node: 1}", "layout=r2.dp2", "training.max_steps=30")
    bound_s = 2.0
    undisturbed = Drive(job(folder, "undisturbed", *shape, "scaling.standbys_per_node=0"), cluster)
    assert undisturbed.run().error is None

    drive = Drive(job(folder, "worker", *shape, f"run.failure_config.detect_bound_s={bound_s}"), cluster)
    killed: dict[int, int] = {}
    pids: dict[int, list[int]] = {}
    stopped_at = 0.0

    def on_step(line: Line) -> None:
        nonlocal stopped_at
        step = line["step"]
        if step == 5 and step not in killed:
            pids[step] = drive.pids()
            killed[step] = drive.signal_worker(3)  # on one node ...
        if step == 12 and step not in killed:
            pids[step] = drive.pids()
            stopped_at = time.time()
            killed[step] = drive.signal_worker(0, signal.SIGSTOP)  # ... and on the other
        if step == 20 and step not in pids:
            pids[step] = drive.pids()
            kill(drive.readers())

    before = undisturbed.metrics
    end = drive.run(on_step)
    assert end.error is None
    assert_every_step_once(drive.metrics, 30)
    for line, expected in zip(drive.metrics, before, strict=True):
        same = ("step", "batch_digest", "loss", "grad_norm", "lr", "layout", "world_size")
        assert {key: line[key] for key in same} == {key: expected[key] for key in same}
    assert_bitwise_equal(drive.checkpoints[-1], undisturbed.checkpoints[-1])

    first, second = drive.incidents
    print(phases(first), phases(second), sep="\n")
    for incident in (first, second):
        assert incident["layout_before"] == incident["layout_after"] == "r2·dp2"
        assert (incident["steps_run_again"], incident["source_tier"], incident["nodes"]) == (0, "memory", [])
        assert len(incident["workers"]) == 1
    assert [rank for rank in range(4) if pids[12][rank] != pids[5][rank]] == [3], "survivors keep their processes"
    assert [rank for rank in range(4) if pids[20][rank] != pids[12][rank]] == [0]
    assert second["since"] + second["phases"]["detect"] - stopped_at < bound_s + 1.5
    assert not any(psutil.pid_exists(pid) for pid in killed.values()), "a hung worker is killed"
