"""What all tests share: a quiet, single-threaded environment, deterministic examples, and one Ray cluster.

``make prove`` sets PLANARIA_PROVE: properties then try many more examples, and the long proofs run in full.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.object_server import CREDENTIALS, ObjectServer

if TYPE_CHECKING:
    from orchestrator.local_cluster import LocalCluster

# Before anything imports torch or Ray, and inherited by every process that a test starts.
os.environ.update(
    OMP_NUM_THREADS="1",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_AUTH_MODE="token",  # Ray's default once a token exists; with our own, ~/.ray is left alone
    RAY_AUTH_TOKEN=secrets.token_hex(16),
)
os.environ.update(CREDENTIALS)  # for the S3 server below; nobody's own are used
os.environ.pop("RAY_ADDRESS", None)  # a test never joins a cluster that it did not start

PROVE = os.environ.get("PLANARIA_PROVE") == "1"

_patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("test", derandomize=True, max_examples=50, database=None, **_patient)
settings.register_profile("prove", max_examples=500, print_blob=True, **_patient)
settings.load_profile("prove" if PROVE else "test")


@pytest.fixture(scope="session")
def prove() -> bool:
    """Whether long proofs run in full; otherwise a test takes a seeded sample of them."""
    return PROVE


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[LocalCluster]:
    """Four real Ray nodes (the head is one) with 2 CPUs each. A test that kills a node starts another one."""
    from orchestrator.local_cluster import local_cluster

    with local_cluster(num_nodes=4, cpus_per_node=2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def object_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """A real S3 server. A test that kills it starts it again."""
    server = ObjectServer(tmp_path_factory.mktemp("objects"))
    server.start()
    yield server
    server.kill()
