"""The Ray actors: `Keeper`, `Worker` and `Reader` with a lease, and nothing else.

The actors are detached, so that they outlive a driver that dies. Each holds a lease that the driver renews; when nobody
has renewed it for ``grace_s`` the process ends itself, the keeper last of all removing its node's placement group.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from checkpointing.holding import HoldingKey
from checkpointing.keeper import Call, Keeper
from checkpointing.node_memory import available_memory
from checkpointing.parity import Span
from orchestrator.environment import code_digest
from pipelines.reader import Reader
from workers.rendezvous import Spaces

NAMESPACE = "planaria"


class Lease:
    """Ends this process when ``renew`` has not been called for ``grace_s`` seconds."""

    def start_lease(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._expires = time.monotonic() + grace_s
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def renew(self) -> int:
        """Called by the driver; returns this process's id."""
        self._expires = time.monotonic() + self._grace_s
        return os.getpid()

    def _watch(self) -> None:
        while (left := self._expires - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
        self.lease_expired()
        os._exit(0)

    def lease_expired(self) -> None:
        """What to do before the process ends."""


@ray.remote(max_restarts=0, concurrency_groups={"shards": 4})
class KeeperActor(Keeper, Lease):
    """A node's keeper. It reserves the node's devices for the workers beside it."""

    def __init__(self, node: str, grace_s: float) -> None:
        Keeper.__init__(self, node, _call)
        self._spaces = Spaces()
        self.start_lease(grace_s)

    @ray.method(concurrency_group="shards")
    def read_shard(self, key: HoldingKey, shard: Span, spans: Sequence[Span]) -> tuple[np.ndarray, str]:
        """On threads of its own, since the keepers that ask wait for it on theirs."""
        return Keeper.read_shard(self, key, shard, spans)

    def resources(self) -> tuple[list[int], int]:
        """Accelerator ids that Ray gave to this node's bundle (none on a CPU node), and bytes of memory left."""
        return [int(index) for index in ray.get_gpu_ids()], available_memory()

    def sees(self, path: str) -> bool:
        """Whether this node sees the file ``path``."""
        return os.path.exists(path)

    def rendezvous(self, request: list[bytes]) -> list[bytes]:
        """Where the members of a generation find each other."""
        return self._spaces.answer(request)

    def lease_expired(self) -> None:
        group = ray.util.get_current_placement_group()
        if group is not None:
            ray.util.remove_placement_group(group)


def _call(calls: Sequence[Call]) -> list[Any]:
    """Bytes that go to several keepers are put among Ray's objects once. An error is the one that was raised there."""
    stored: dict[int, Any] = {}
    times = Counter(id(arg) for _, _, args in calls for arg in args if isinstance(arg, np.ndarray))

    def sent(arg: Any) -> Any:
        if times[id(arg)] > 1:
            return stored.get(id(arg)) or stored.setdefault(id(arg), ray.put(arg))
        return arg

    try:
        return ray.get([getattr(keeper, method).remote(*map(sent, args)) for keeper, method, args in calls])
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None


@ray.remote(max_restarts=0)
class ReaderActor(Reader, Lease):
    """Builds batches ahead of the trainers."""

    def __init__(self, grace_s: float, *args: Any) -> None:
        Reader.__init__(self, *args)
        self.start_lease(grace_s)


@ray.remote(max_restarts=0)
class WorkerActor(Lease):
    """A worker. Torch is imported in the actor's own process only; every method is `workers.worker.Worker`'s."""

    def __init__(self, grace_s: float, device_index: int | None, num_threads: int) -> None:
        from workers.worker import Worker

        self.start_lease(grace_s)
        self._worker = Worker(device_index, num_threads)

    def warm_up(self) -> dict[str, Any]:
        """As `Worker.warm_up`, and the digest of the code that this process runs."""
        return {**self._worker.warm_up(), "code_digest": code_digest()}

    def describe(self, program: Any) -> Any:
        return self._worker.describe(program)

    def run(self, order: Any) -> Any:
        return self._worker.run(order)

    def rest(self) -> None:
        self._worker.rest()

    def fence(self, generation: int, cause: str) -> float:
        return self._worker.fence(generation, cause)

    def quiesced(self, generation: int, timeout_s: float) -> Any:
        return self._worker.quiesced(generation, timeout_s)

    def stop_after_step(self) -> None:
        self._worker.stop_after_step()

    def reports(self, generation: int, after: int, timeout_s: float) -> Any:
        return self._worker.reports(generation, after, timeout_s)

    def use_readers(self, readers: tuple[Any, ...]) -> None:
        self._worker.use_readers(readers)

    def ping(self) -> float:
        return time.time()
