"""The reader actors of a job: on different nodes where there are several, replaced when they die."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.actors import ReaderActor
from orchestrator.nodes import Node

_READER_THREADS = 32


class Readers:
    """Keeps ``num_readers`` readers alive, one per node as far as there are nodes."""

    def __init__(self, num_readers: int, orphan_grace_s: float, reader_args: tuple[Any, ...]) -> None:
        self._num_readers = num_readers
        self._grace_s = orphan_grace_s
        # Put once, so that a corpus manifest of many files does not travel with every replacement.
        self._args = [ray.put(arg) for arg in reader_args]
        self._actors: list[tuple[str, Any]] = []

    def ensure(self, nodes: list[Node]) -> bool:
        """Drop readers of lost nodes and start what is missing, in the background; whether anything changed."""
        before = list(self._actors)
        names = {node.name for node in nodes}
        self._actors = [(name, actor) for name, actor in self._actors if name in names]
        while nodes and len(self._actors) < self._num_readers:
            load = {node.name: sum(name == node.name for name, _ in self._actors) for node in nodes}
            node = min(nodes, key=lambda node: load[node.name])
            actor = ReaderActor.options(
                num_cpus=0,
                lifetime="detached",
                max_concurrency=_READER_THREADS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.ray_node.ray_id, soft=True),
            ).remote(self._grace_s, *self._args)
            self._actors.append((node.name, actor))
        return self._actors != before

    def check(self) -> None:
        """Wait until every reader can serve; raises the reader's own error (a text that this node cannot read, say)."""
        ray.get([actor.ready.remote() for _, actor in self._actors])

    def forget(self, dead: set[Any]) -> None:
        """These have died; ``ensure`` starts others in their place."""
        self._actors = [(name, actor) for name, actor in self._actors if actor not in dead]

    def preference(self, node: str) -> tuple[Any, ...]:
        """Reader handles for a worker on ``node``: its own node's first."""
        return tuple(actor for _, actor in sorted(self._actors, key=lambda entry: entry[0] != node))

    def renew(self) -> list[tuple[Any, Any]]:
        """Renew every lease; (actor, call) pairs, not waited for."""
        return [(actor, actor.renew.remote()) for _, actor in self._actors]

    def shut_down(self) -> None:
        for _, actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
