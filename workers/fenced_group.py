"""Process groups whose waits can be ended from any thread in about a millisecond, whatever gloo is doing.

Stock gloo leaves survivors of a killed peer waiting for its timeout, and its ``abort`` does nothing. Here no thread of
ours ever waits inside gloo: collectives wait for the work's future or the fence; sends, receives and connecting run in
helper threads that may get stuck in our place. A trip also shuts the generation's TCP connections, so that the peers'
operations fail and trip their own fences: one failure reaches everybody without a coordinator.

What gloo still holds when a generation is dissolved is parked until gloo has given up, because destroying it blocks.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from workers import sockets
from workers.callers import Callers
from workers.device import Device
from workers.fence import Fence, Fenced
from workers.fenced_gloo import FencedGroup, FencedWork
from workers.rendezvous import RendezvousClient, Space, gather

BACKEND = "fenced"

__all__ = ["BACKEND", "Fence", "Fenced", "Generation"]


class _GenerationStore(dist.Store):
    """torch's view of a ``Space``. ``generation`` lets the backend's creator, which gets only a store, find its way."""

    def __init__(self, generation: Generation, space: Space, deadline: float) -> None:
        super().__init__()
        self.generation = generation
        self.space = space
        self._deadline = deadline

    def set(self, key: str, value: bytes | str) -> None:
        self.space.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self.space.wait([key], self._deadline)[0]

    def add(self, key: str, amount: int) -> int:
        return self.space.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return not self.space.look(keys)[1]

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        as_bytes = (value.encode() if isinstance(value, str) else bytes(value) for value in (expected, desired))
        return self.space.compare_set(key, *as_bytes)

    def delete_key(self, key: str) -> bool:
        return self.space.delete(key)

    def num_keys(self) -> int:
        return self.space.num_keys()

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.space.wait(keys, self._deadline if timeout is None else timeout.total_seconds())


class Generation:
    """The process groups of one membership: formed together, fenced together, dissolved together.

    Any thread may use the groups; as ever in torch, all ranks must issue a group's operations in the same order.
    """

    def __init__(
        self,
        rendezvous: RendezvousClient,
        scope: str,
        number: int,
        rank: int,
        world_size: int,
        fence: Fence,
        timeout: float,
        deadline: float,
    ) -> None:
        """Use ``form``."""
        self.number = number
        self.rank = rank
        self.world_size = world_size
        self.fence = fence
        self._timeout = timeout
        self._deadline = deadline
        self._host = rendezvous.local_host
        # Held here because the backend's creator finds this Python object only while it is alive.
        self._store = _GenerationStore(self, Space(rendezvous, scope, number, fence), deadline)
        self._callers = Callers()
        self._groups: list[dist.ProcessGroupGloo] = []
        self._listeners: set[sockets.Address] = set()
        self._settled = threading.Condition()
        self._in_flight: dict[int, dist.Work] = {}  # keeps alive what gloo may still touch
        self._tokens = itertools.count()

    @classmethod
    def form(
        cls,
        rendezvous: RendezvousClient,
        number: int,
        rank: int,
        world_size: int,
        fence: Fence,
        device: Device,
        *,
        timeout_s: float = 60.0,
        deadline_s: float = 5.0,
        scope: str = "workers",
    ) -> Generation:
        """Make torch's default process group of generation ``number`` with all other ranks; blocks until they come.

        ``timeout_s`` bounds each later operation, ``deadline_s`` the forming of this and every later group.
        Raises ``RendezvousError`` (a rank did not come, the server is gone, the generation is over) or ``Fenced``; the
        fence has tripped then, and the process may form the next generation.
        """
        generation = cls(rendezvous, scope, number, rank, world_size, fence, timeout_s, deadline_s)
        fence.on_trip(generation._shut_connections)
        if device.abort_groups is not None:
            fence.on_trip(device.abort_groups)
        hook = sys.excepthook
        try:
            dist.init_process_group(
                device.backend,
                store=generation._store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        except Exception as error:
            fence.trip(error)
            # torch counts the groups it names, also those that failed; the next generation's names must agree again.
            dist.distributed_c10d._world.group_count = 0
            generation._park()
            raise
        finally:
            sys.excepthook = hook  # torch wraps it once more for every generation
        return generation

    def dissolve(self) -> None:
        """Destroy all groups at once. Never blocks; what gloo still works on is parked until gloo has given up."""
        dist.destroy_process_group()
        self._park()

    def run(self, calls: Sequence[Callable[[], dist.Work]], finish: Callable[[], None] | None) -> FencedWork:
        """Issue gloo collectives as one work."""
        work = FencedWork(self.fence, len(calls), finish)
        for call in calls:
            issued = self._issue(call)
            token = self._keep(issued)
            issued.get_future().add_done_callback(functools.partial(self._collective_done, work, token))
        return work

    def _collective_done(self, work: FencedWork, token: int, future: torch.futures.Future) -> None:
        self._settle(work, token, future.value)

    def run_point_to_point(self, call: Callable[[], dist.Work], receives: bool) -> FencedWork:
        """Issue a send or receive. Gloo's work can only be waited for (no future, no polling), so a helper waits."""
        work = FencedWork(self.fence, 1)
        issued = self._issue(call)
        token = self._keep(issued)

        def outcome() -> int:
            issued.wait()
            return issued._source_rank() if receives else -1

        self._callers.submit(lambda: self._settle(work, token, outcome))
        return work

    def _settle(self, work: FencedWork, token: int, outcome: Callable[[], Any]) -> None:
        try:
            result = outcome()
        except RuntimeError as error:  # whatever gloo says, this group is of no use any more
            self.fence.trip(error)
        else:
            work.settle(result if isinstance(result, int) else -1)
        self._release(token)

    def make_group(self, store: dist.Store, group_id: str, rank: int, members: Sequence[int]) -> FencedGroup:
        """Connect the group of ``members`` (global ranks), of which this process is the ``rank``-th."""
        try:
            device, own = self._listen()
            told, name = f"{own[0]} {own[1]}".encode(), f"listeners/{group_id}"
            for listener in gather(self._store.space, name, self.rank, members, told, self._deadline):
                host, port = listener.decode().split()
                self._listeners.add((host, int(port)))
            gloo = self._connect(store, device, rank, len(members))
        except Exception as error:
            self.fence.trip(error)
            raise
        gloo._set_default_timeout(timedelta(seconds=self._timeout))
        self._groups.append(gloo)
        return FencedGroup(self, gloo, rank, len(members))

    def _listen(self) -> tuple[Any, sockets.Address]:
        """A new gloo device (one per group: a shared one fails to connect) and the address it listens on."""
        while True:
            before = sockets.listening()
            device = dist.ProcessGroupGloo.create_device(hostname=self._host)
            opened = sockets.listening() - before
            if len(opened) == 1:
                return device, opened.pop()
            # Another thread began to listen at the same moment, and its connections must never be shut: try again.

    def _connect(self, store: dist.Store, device: Any, rank: int, size: int) -> dist.ProcessGroupGloo:
        """Gloo's own connecting, in a helper: a peer that dies in it leaves it stuck until the deadline."""
        options = dist.ProcessGroupGloo._Options()
        options._devices = [device]
        options._timeout = timedelta(seconds=self._deadline)
        connected: list[dist.ProcessGroupGloo | Exception] = []
        done = threading.Event()

        def connect() -> None:
            try:
                connected.append(dist.ProcessGroupGloo(store, rank, size, options))
            except Exception as error:
                connected.append(error)
            done.set()

        self._callers.submit(connect)
        with self.fence.waking(done):
            done.wait()
        if not connected:
            self.fence.check()
        result = connected[0]
        if isinstance(result, Exception):
            raise result
        return result

    def _issue(self, call: Callable[[], dist.Work]) -> dist.Work:
        self.fence.check()
        try:
            return call()
        except RuntimeError as error:
            # A wrong argument is the caller's and ends nothing; an error of gloo's own means that a peer is gone.
            if "gloo/" in str(error):
                self.fence.trip(error)
            self.fence.check()
            raise

    def _keep(self, issued: dist.Work) -> int:
        with self._settled:
            token = next(self._tokens)
            self._in_flight[token] = issued
        return token

    def _release(self, token: int) -> None:
        with self._settled:
            del self._in_flight[token]
            self._settled.notify_all()

    def _shut_connections(self) -> None:
        sockets.shut_connections(self._listeners)

    def _park(self) -> None:
        """Let a thread hold the gloo groups until nothing is in flight, or gloo's own timeout has ended it."""
        self._callers.close()

        def bury() -> None:
            with self._settled:
                self._settled.wait_for(lambda: not self._in_flight, self._timeout + 1.0)
            self._groups.clear()
            self._in_flight.clear()

        # With nothing in flight it takes milliseconds and the interpreter may well wait for it at its exit.
        threading.Thread(target=bury, name="fenced-park", daemon=bool(self._in_flight)).start()


def _create(options: Any, _backend_options: Any) -> FencedGroup:
    """torch calls this for every group; its generation is found through the store that torch was given."""
    origin = options.store
    while isinstance(origin, dist.PrefixStore):
        origin = origin.underlying_store
    if not isinstance(origin, _GenerationStore):
        raise ValueError(f"the backend {BACKEND!r} makes groups only within Generation.form")
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    return origin.generation.make_group(options.store, options.group_id, options.group_rank, members)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
