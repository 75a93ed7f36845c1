"""The nodes a job uses: one placement group each, with keeper, workers and standbys, warmed up in the background."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.actors import KeeperActor, WorkerActor
from orchestrator.cluster import RayNode, living_nodes
from orchestrator.config import ScalingConfig
from orchestrator.environment import code_digest
from workers.heap import ENVIRONMENT as HEAP_ENVIRONMENT

_WORKER_THREADS = 8  # run, fence, quiesced, reports, ping and renew may all be under way at once
_KEEPER_THREADS = 32
_ALIVE_AFTER_S = 15.0  # Ray takes some 13 s to know a dead node: one that it lists for longer has only lost processes


@dataclass
class WorkerHandle:
    """A worker process of a node. ``warming`` is the call under way until it is warm, ``pid`` known from then on."""

    id: str
    node: str
    actor: Any
    warming: Any
    pid: int | None = None

    @property
    def is_warm(self) -> bool:
        return self.warming is None


@dataclass
class Node:
    """A node of the job. ``workers`` may play ranks; ``standbys`` take over for workers that die on this node."""

    name: str
    ray_node: RayNode
    num_workers: int
    group: PlacementGroup
    keeper: Any = None
    device_ids: list[int] = field(default_factory=list)
    memory: int = 0  # bytes that were left when the keeper started
    starting: Any = None
    workers: dict[str, WorkerHandle] = field(default_factory=dict)
    standbys: dict[str, WorkerHandle] = field(default_factory=dict)
    num_started: int = 0

    @property
    def handles(self) -> list[WorkerHandle]:
        """Workers and standbys; a list of its own, since another thread renews their leases."""
        return [*self.workers.values(), *self.standbys.values()]


class Nodes:
    """Admits nodes, keeps their processes at strength, and lets go of what is lost. Nothing here blocks on a node."""

    def __init__(self, scaling: ScalingConfig, orphan_grace_s: float) -> None:
        self._scaling = scaling
        self._grace_s = orphan_grace_s
        self._nodes: dict[str, Node] = {}
        self._num_named = 0
        self._lost: dict[str, float] = {}
        self._code_digest = code_digest()
        self.per_worker = _resources_per_worker(scaling)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    @property
    def domains(self) -> dict[str, str]:
        """Failure domain of each node whose keeper is up."""
        return {node.name: node.ray_node.domain for node in self if node.keeper is not None and node.starting is None}

    @property
    def arena_memory(self) -> dict[str, int]:
        """Bytes that arenas may take on each of these nodes: half of what was left; workers need the rest."""
        return {name: self._nodes[name].memory // 2 for name in self.domains}

    def ready_workers(self) -> dict[str, WorkerHandle]:
        """Workers that can play a rank now, by id, in placement order (node by node)."""
        return {
            worker.id: worker
            for node in self
            for worker in node.workers.values()
            if worker.is_warm and node.starting is None
        }

    def pid_of(self, worker: str) -> int | None:
        """Process id of a worker or standby on its node."""
        return next(handle.pid for node in self for handle in node.handles if handle.id == worker)

    def capacity(self, node: RayNode) -> int:
        """Workers that fit on what is free on ``node``."""
        if not all(node.labels.get(key) == value for key, value in (self._scaling.label_selector or {}).items()):
            return 0
        return int(min(node.free.get(name, 0.0) / amount for name, amount in self.per_worker.items()))

    def admit_new(self) -> list[Node]:
        """Start keepers, workers and standbys on nodes that joined, as far as the job's maximum has room."""
        used = {node.ray_node.ray_id for node in self}
        room = self._scaling.max_workers - sum(node.num_workers for node in self)
        fresh = [
            node
            for node in living_nodes()
            if node.ray_id not in used and time.monotonic() - self._lost.get(node.ray_id, -1e9) > _ALIVE_AFTER_S
        ]
        admitted = []
        for ray_node in sorted(fresh, key=self.capacity, reverse=True):
            num_workers = min(room, self.capacity(ray_node))
            if num_workers > 0:
                admitted.append(self._admit(ray_node, num_workers))
                room -= num_workers
        return admitted

    def _admit(self, ray_node: RayNode, num_workers: int) -> Node:
        self._num_named += 1
        bundle = {name: amount * num_workers for name, amount in self.per_worker.items()}
        group = placement_group(
            [bundle],
            strategy="STRICT_PACK",
            lifetime="detached",
            bundle_label_selector=[{"ray.io/node-id": ray_node.ray_id}],
        )
        node = Node(f"node-{self._num_named}", ray_node, num_workers, group)
        node.keeper = KeeperActor.options(
            **_reserve(bundle),
            **_placed(group, f"keeper-{node.name}"),
            max_concurrency=_KEEPER_THREADS,
        ).remote(node.name, self._grace_s)
        node.starting = node.keeper.resources.remote()
        self._nodes[node.name] = node
        if "GPU" not in self.per_worker:
            self._fill(node)  # a CPU worker need not wait to be told its device
        return node

    def _fill(self, node: Node) -> None:
        """Start the workers and standbys that a node lacks."""
        while len(node.workers) < node.num_workers:
            handle = self._start(node)
            node.workers[handle.id] = handle
        while len(node.standbys) < self._scaling.standbys_per_node:
            handle = self._start(node)
            node.standbys[handle.id] = handle

    def _start(self, node: Node) -> WorkerHandle:
        index = node.num_started
        node.num_started += 1
        name = f"{node.name}/{index}"
        num_threads = max(1, int(self.per_worker.get("CPU", 1)))
        device = node.device_ids[index % node.num_workers] if node.device_ids else None
        env = {
            "OMP_NUM_THREADS": str(num_threads),
            # A lost DNS packet must not hold up a new connection for 5 s.
            "RES_OPTIONS": "timeout:1 attempts:1",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            **HEAP_ENVIRONMENT,
        }
        actor = WorkerActor.options(
            num_cpus=0,
            num_gpus=0,
            **_placed(node.group, name),
            max_concurrency=_WORKER_THREADS,
            runtime_env={"env_vars": env},
        ).remote(self._grace_s, device, num_threads)
        return WorkerHandle(name, node.name, actor, actor.warm_up.remote())

    def poll(self) -> tuple[list[str], list[tuple[str, str]]]:
        """See what finished warming up: ids of workers now ready, and (name, cause) of nodes or workers that failed."""
        ready, failed = [], []
        for node in list(self):
            if node.starting is not None and ray.wait([node.starting], timeout=0)[0]:
                try:
                    node.device_ids, node.memory = ray.get(node.starting)
                    node.starting = None
                    self._fill(node)
                except ray.exceptions.RayError as error:
                    failed.append((node.name, f"its keeper did not start: {type(error).__name__}"))
                    continue
            for handle in node.handles:
                if handle.warming is None or not ray.wait([handle.warming], timeout=0)[0]:
                    continue
                try:
                    facts = ray.get(handle.warming)
                except ray.exceptions.RayError as error:
                    self.drop_worker(handle)
                    failed.append((handle.id, f"it did not start: {type(error).__name__}: {error}"))
                    continue
                if facts["code_digest"] != self._code_digest:
                    self.drop_worker(handle)
                    failed.append((handle.id, "its node has another version of Planaria's code than the driver"))
                    continue
                handle.pid, handle.warming = facts["pid"], None
                ready.append(handle.id)
        return ready, failed

    def drop_worker(self, handle: WorkerHandle) -> None:
        """Kill a worker (it may be hung rather than dead); a warm standby of its node takes its place."""
        ray.kill(handle.actor)
        node = self._nodes[handle.node]
        if node.standbys.pop(handle.id, None) is None and node.workers.pop(handle.id, None) is not None:
            standby = next((other for other in node.standbys.values() if other.is_warm), None)
            if standby is not None:
                node.workers[standby.id] = node.standbys.pop(standby.id)

    def refill(self) -> None:
        """Bring every node back to strength, in the background."""
        for node in self:
            if node.starting is None:
                self._fill(node)

    def gone(self) -> list[str]:
        """Nodes that Ray knows to be dead. It takes Ray some seconds to know; who plays a rank is missed sooner."""
        alive = {node.ray_id for node in living_nodes()}
        return [node.name for node in self if node.ray_node.ray_id not in alive]

    def lose(self, name: str) -> None:
        """Forget a node and everything on it; whatever still runs there is killed."""
        node = self._nodes.pop(name)
        self._lost[node.ray_node.ray_id] = time.monotonic()
        _end(node)

    def renew(self) -> list[Any]:
        """Renew every lease; the calls are not waited for."""
        actors = [node.keeper for node in list(self)] + [handle.actor for node in list(self) for handle in node.handles]
        return [actor.renew.remote() for actor in actors]

    def shut_down(self) -> None:
        """End every process of the job and give back the resources."""
        for node in list(self):
            _end(node)
        self._nodes.clear()


def _end(node: Node) -> None:
    """Kill a node's actors (those that wait to be placed do not go with their group) and free its devices."""
    for handle in node.handles:
        ray.kill(handle.actor)
    ray.kill(node.keeper)
    remove_placement_group(node.group)


def _resources_per_worker(scaling: ScalingConfig) -> dict[str, float]:
    resources = scaling.worker_resources()
    if scaling.accelerator_type:
        resources[f"accelerator_type:{scaling.accelerator_type}"] = 0.001
    return {name: float(amount) for name, amount in resources.items() if amount > 0}


def _reserve(bundle: dict[str, float]) -> dict[str, Any]:
    """Actor options that take the whole bundle."""
    other = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "resources": other}


def _placed(group: PlacementGroup, name: str) -> dict[str, Any]:
    return {
        "lifetime": "detached",
        "name": f"{group.id.hex()[:12]}/{name}",
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
    }
