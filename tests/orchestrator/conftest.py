"""The shared cluster for tests that take nodes and processes away, and the run of one worker they are held against."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orchestrator.local_cluster import LocalCluster
from tests.orchestrator.jobs import REFERENCE_STEPS, Drive, Line, assert_every_step_once, job, left_behind, write_text

NUM_NODES = 4


@pytest.fixture
def cluster(ray_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Four nodes, whole; when the test is over, no process, actor or placement group of a job may be left on them."""
    ray_cluster.add_nodes(NUM_NODES - len(ray_cluster.nodes))
    yield ray_cluster
    assert left_behind(ray_cluster) == []


@pytest.fixture(scope="session")
def reference(ray_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> list[Line]:
    """The metrics of one worker on its own, which makes all steps of ``job``'s training in a row."""
    folder = tmp_path_factory.mktemp("reference")
    write_text(folder)
    drive = Drive(job(folder, "reference", f"training.max_steps={REFERENCE_STEPS}"), ray_cluster)
    assert drive.run().error is None
    assert_every_step_once(drive.metrics, REFERENCE_STEPS)
    return drive.metrics
