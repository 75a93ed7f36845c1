"""The shared cluster for tests that take nodes and processes away: whole before each test, empty after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orchestrator.local_cluster import LocalCluster

NUM_NODES = 4


@pytest.fixture
def cluster(ray_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Four nodes; when the test is over, no process, actor or placement group of a job may be left on them."""
    from tests.orchestrator.jobs import left_behind

    ray_cluster.add_nodes(NUM_NODES - len(ray_cluster.nodes))
    yield ray_cluster
    assert left_behind(ray_cluster) == []
