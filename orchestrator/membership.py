"""Who takes part: admits nodes that joined, notes what is warm or gone, and brings nodes back to strength."""

from __future__ import annotations

import time
from collections.abc import Sequence

from orchestrator.ledger import Ledger
from orchestrator.nodes import Nodes
from orchestrator.readers import Readers

_LOOK_EVERY_S = 1.0
_MOST_FAILED_STARTS = 8  # before the first step; later the job lives on what it has


class Membership:
    """Keeps ``nodes`` and ``readers`` in step with the cluster. Every change is an event."""

    def __init__(self, nodes: Nodes, readers: Readers, ledger: Ledger) -> None:
        self._nodes, self._readers, self._ledger = nodes, readers, ledger
        self._num_failed_starts, self._failed_start = 0, ""
        self._next_look = 0.0

    @property
    def cannot_start(self) -> str | None:
        """The cause of the newest failed start, once there have been too many for a beginning."""
        return self._failed_start if self._num_failed_starts >= _MOST_FAILED_STARTS else None

    def is_warm(self, num_workers: int) -> bool:
        """Whether nobody is starting any more and so many workers are ready."""
        starting = any(handle.warming for node in self._nodes for handle in node.workers.values())
        return not starting and len(self._nodes.ready_workers()) >= num_workers

    def look(self, refill: bool = True) -> bool:
        """Look at the cluster, at most once a second. ``refill``: also start what is missing on the nodes there are.

        Returns whether the readers changed.
        """
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        for node in self._nodes.admit_new():
            self._ledger.event(
                "node_admitted", node=node.name, ray_node=node.ray_node.ray_id, num_workers=node.num_workers
            )
        ready, failed = self._nodes.poll()
        for name in ready:
            self._ledger.event("worker_ready", worker=name, pid=self._nodes.pid_of(name))
        for name, cause in failed:
            self._ledger.event("start_failed", what=name, cause=cause)
            self._num_failed_starts, self._failed_start = self._num_failed_starts + 1, cause
            if name in self._nodes:
                self._lose(name)
        for name in self._nodes.gone():
            self._lose(name)
        if refill:
            self._nodes.refill()
        return self._readers.ensure(list(self._nodes))

    def forget(self, workers: Sequence[str], nodes: Sequence[str]) -> None:
        """Go on without these."""
        for name in nodes:
            self._lose(name)
        for name in workers:
            node = name.split("/")[0]
            if node in self._nodes:
                self._nodes.drop_worker(self._nodes[node].workers[name])
                self._ledger.event("worker_lost", worker=name)
        self._readers.ensure(list(self._nodes))

    def _lose(self, node: str) -> None:
        self._nodes.lose(node)
        self._ledger.event("node_lost", node=node)
