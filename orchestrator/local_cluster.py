"""Several real Ray nodes on this machine, for demo, tests and benchmarks: each can be killed and replaced."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import psutil
from ray.cluster_utils import Cluster

from orchestrator.scratch import ray_files

_OBJECT_STORE_BYTES = 150 * 2**20


class LocalCluster:
    """A Ray cluster of separate nodes (own raylet, agents and object store each) that share this machine's cores."""

    def __init__(self, cpus_per_node: int, temp_dir: str, object_store_nbytes: int) -> None:
        self._cpus, self._object_store_nbytes = cpus_per_node, object_store_nbytes
        self._temp_dir = temp_dir
        self._cluster = Cluster()
        self._add(head=True)

    def _add(self, head: bool = False) -> Any:
        where = {"temp_dir": self._temp_dir, "include_dashboard": False} if head else {}
        return self._cluster.add_node(
            num_cpus=self._cpus,
            object_store_memory=self._object_store_nbytes,
            dashboard_agent_listen_port=0,  # the default port belongs to a cluster that the user may have
            **where,
        )

    @property
    def address(self) -> str:
        return self._cluster.address

    @property
    def nodes(self) -> list[Any]:
        """Handles of all nodes that have not been killed, the head first. ``node_id`` is Ray's id of a node."""
        return self._cluster.list_all_nodes()

    def add_nodes(self, count: int) -> list[Any]:
        """Start nodes; returns their handles once the cluster knows them.

        One after the other: the kernel ends a node's processes with the *thread* that started them.
        """
        return [self._add() for _ in range(count)]

    def processes(self, node: Any) -> list[psutil.Process]:
        """Every process of a node: raylet, agents, and all that the raylet started (keeper, workers, readers)."""
        pids = [info.process.pid for infos in node.all_processes.values() for info in infos]
        roots = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        return [process for root in roots for process in (root, *root.children(recursive=True))]

    def kill_node(self, node: Any) -> list[int]:
        """SIGKILL all of a node's processes in one go, as a power cut would; returns their ids."""
        processes = self.processes(node)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)  # reaps them, and expects this node no longer
        return [process.pid for process in processes]

    def shut_down(self) -> None:
        self._cluster.shutdown()


@contextlib.contextmanager
def local_cluster(
    num_nodes: int, cpus_per_node: int, object_store_nbytes: int = _OBJECT_STORE_BYTES
) -> Iterator[LocalCluster]:
    """A cluster with ``num_nodes`` nodes (the head is the first) that leaves no process and no file behind."""
    with ray_files() as folder:
        cluster = LocalCluster(cpus_per_node, folder, object_store_nbytes)
        try:
            if num_nodes > 1:
                cluster.add_nodes(num_nodes - 1)
            yield cluster
        finally:
            cluster.shut_down()
