"""The reader actors of a job: on different nodes where there are several, replaced when they die."""

from __future__ import annotations

import threading
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
        self._lock = threading.Lock()  # leases are renewed, and dead readers found, by another thread
        self._actors: list[tuple[str, Any]] = []
        self._starting: dict[Any, Any] = {}  # actor -> the call that returns once it can serve

    def ensure(self, nodes: list[Node]) -> bool:
        """Drop readers of lost nodes and start what is missing, in the background; whether ``preference`` changed."""
        with self._lock:
            before = list(self._actors)
            names = {node.name for node in nodes}
            self._actors = [(name, actor) for name, actor in before if name in names]
            starting = {actor: self._starting[actor] for _, actor in self._actors if actor in self._starting}
            self._starting = {actor: call for actor, call in starting.items() if not ray.wait([call], timeout=0)[0]}
            began = len(self._starting) < len(starting)
            for name, actor in before:
                if name not in names:
                    ray.kill(actor)  # its node may be lost to the job and still run
            while nodes and len(self._actors) < self._num_readers:
                load = {node.name: sum(name == node.name for name, _ in self._actors) for node in nodes}
                node = min(nodes, key=lambda node: load[node.name])
                self._actors.append((node.name, self._start(node)))
            return began or self._actors != before

    def _start(self, node: Node) -> Any:
        actor = ReaderActor.options(
            num_cpus=0,
            lifetime="detached",
            max_concurrency=_READER_THREADS,
            # Hard: a reader somewhere else would be missed when that node dies.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.ray_node.ray_id, soft=False),
        ).remote(self._grace_s, *self._args)
        self._starting[actor] = actor.ready.remote()
        return actor

    def check(self) -> None:
        """Wait until every reader can serve. Raises ValueError with the sentence of a reader that cannot begin (a text
        that its node cannot read, say), RayActorError when one has died."""
        try:
            ray.get([actor.ready.remote() for _, actor in self._actors])
        except ray.exceptions.ActorDiedError as error:
            if not error.actor_init_failed:
                raise
            raise ValueError(str(error).strip().splitlines()[-1]) from None

    def forget(self, dead: set[Any]) -> None:
        """These have died; ``ensure`` starts others in their place."""
        with self._lock:
            self._actors = [(name, actor) for name, actor in self._actors if actor not in dead]

    def preference(self, node: str) -> tuple[Any, ...]:
        """Reader handles for a worker on ``node``: those that can serve first, of these its own node's."""

        def rank(entry: tuple[str, Any]) -> tuple[bool, bool]:
            name, actor = entry
            return actor in self._starting, name != node

        return tuple(actor for _, actor in sorted(self._actors, key=rank))

    def renew(self) -> list[tuple[Any, Any]]:
        """Renew every lease; (actor, call) pairs, not waited for."""
        return [(actor, actor.renew.remote()) for _, actor in self._actors]

    def shut_down(self) -> None:
        for _, actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
