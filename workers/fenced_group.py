"""Process groups whose waits can be ended from any thread within 50 ms, whatever gloo is doing.

Stock gloo leaves survivors of a killed peer waiting for its timeout, and its ``abort`` does nothing. Here no thread of
ours waits inside gloo for long: collectives look at the fence every 50 ms; sends, receives and connecting run in
helper threads that may get stuck in our place. A trip also shuts the generation's TCP connections, so that the peers'
operations fail and trip their own fences. So a death reaches all who wait for it, directly or through others, without
a coordinator; ``watch_peers`` has it reach those who are busy computing as well. Only of a peer that is silent
(stopped, cut off) every survivor must be told.

What gloo still holds when a generation is dissolved is parked until gloo has given up, because destroying it blocks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from workers import sockets
from workers.callers import Callers
from workers.device import Device
from workers.fence import Fence, Fenced
from workers.fenced_gloo import CollectiveWork, FencedGroup, PointToPointWork
from workers.generation_store import GenerationStore
from workers.rendezvous import MissingKeys, Rendezvous, RendezvousError, Space, gather

BACKEND = "fenced"
MANY_IN_FLIGHT = 64

__all__ = ["BACKEND", "Fence", "Fenced", "Generation"]


class Generation:
    """The process groups of one membership: formed together, fenced together, dissolved together.

    Any thread may use the groups; as ever in torch, all ranks must issue a group's operations in the same order.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
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
        self._store = GenerationStore(self, Space(rendezvous, scope, number, fence), deadline)
        self._callers = Callers()
        self._groups: list[dist.ProcessGroupGloo] = []
        self._listeners: set[sockets.Address] = set()
        self._watch: sockets.Watch | None = None
        self._lock = threading.Lock()
        self._in_flight: set[CollectiveWork] = set()  # keeps alive what gloo may still touch

    @classmethod
    def form(
        cls,
        rendezvous: Rendezvous,
        number: int,
        rank: int,
        world_size: int,
        fence: Fence,
        device: Device,
        *,
        timeout: float = 600.0,
        deadline: float = 5.0,
        scope: str = "workers",
    ) -> Generation:
        """Make torch's default process group of generation ``number`` with all other ranks; blocks until they come.

        ``timeout`` (seconds) bounds each later operation, ``deadline`` the forming of this and every later group.
        Raises ``RendezvousError`` (a rank did not come, the server is gone, the generation is over) or ``Fenced``; the
        fence has tripped then, and the process may form the next generation.
        """
        generation = cls(rendezvous, scope, number, rank, world_size, fence, timeout, deadline)
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
                timeout=timedelta(seconds=timeout),
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

    def watch_peers(self) -> None:
        """From now on a peer that closes its connections trips the fence, also while this rank is busy elsewhere.

        As a rule it has died. But who leaves in good order closes them too, so all ranks must call ``let_peers_go``
        before the last operation that they take part in together.
        """
        if self._listeners:
            self._watch = sockets.Watch(
                self._listeners, lambda peer: self.fence.trip(f"{peer[0]}:{peer[1]} closed the connection")
            )

    def let_peers_go(self) -> None:
        """End ``watch_peers``."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def dissolve(self) -> None:
        """Destroy all groups at once. Never blocks; what gloo still works on is parked until gloo has given up."""
        self.let_peers_go()
        dist.destroy_process_group()
        self._park()

    def run(self, calls: Sequence[Callable[[], dist.Work]], finish: Callable[[], None] | None) -> CollectiveWork:
        """Issue gloo collectives as one work."""
        work = CollectiveWork(self.fence, [self._issue(call) for call in calls], finish, self._over)
        with self._lock:
            if len(self._in_flight) > MANY_IN_FLIGHT:  # some are never waited for
                self._in_flight = {other for other in self._in_flight if not other.is_completed()}
            self._in_flight.add(work)
        return work

    def _over(self, work: CollectiveWork) -> None:
        with self._lock:
            self._in_flight.discard(work)

    def run_point_to_point(self, call: Callable[[], dist.Work], receives: bool) -> PointToPointWork:
        """Issue a send or receive and have a helper thread wait for it."""
        work = PointToPointWork(self.fence, self._issue(call), receives, timedelta(seconds=self._timeout))
        self._callers.submit(work.settle)
        return work

    def make_group(self, store: dist.Store, group_id: str, rank: int, members: Sequence[int]) -> FencedGroup:
        """Connect the group of ``members`` (global ranks), of which this process is the ``rank``-th."""
        if len(members) == 1:
            store = dist.HashStore()  # nobody else has to know of it
        try:
            device, own = self._listen()
            told, name = f"{own[0]} {own[1]}".encode(), f"listeners/{group_id}"
            if len(members) > 1:
                for listener in gather(self._store.space, name, self.rank, members, told, self._deadline):
                    host, port = listener.decode().split()
                    self._listeners.add((host, int(port)))
            gloo = self._connect(store, device, rank, len(members))
        except RuntimeError as error:
            self.fence.trip(error)
            if isinstance(error, MissingKeys):  # of gloo's own exchange: its keys end in the rank within the group
                absent = members[int(error.keys[0].rsplit("/", 1)[1])]
                raise RendezvousError(f"rank {absent} left within {self._deadline:g} s of coming") from None
            if isinstance(error, Fenced | RendezvousError):
                raise
            raise Fenced(str(error)) from error
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
            done.wait(self._deadline)  # gloo's own bound is not kept: it has tried for 25 s when a peer died
        if not connected:
            self.fence.check()
            raise RendezvousError(f"not connected to all members within {self._deadline:g} s: one died while they met")
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

    def _shut_connections(self) -> None:
        sockets.shut_connections(self._listeners)

    def _park(self) -> None:
        """Let a thread hold the groups and what gloo may still touch until gloo is done or has timed out."""
        self._callers.close()
        with self._lock:
            parts = (part for work in self._in_flight for part in work.parts)
            futures = [part.get_future() for part in parts if not part.is_completed()]
        stuck = bool(futures) or self._callers.num_busy > 0

        def bury() -> None:
            deadline = time.monotonic() + self._timeout + 1.0
            for future in futures:
                ended = threading.Event()
                future.add_done_callback(lambda _, ended=ended: ended.set())
                ended.wait(max(0.0, deadline - time.monotonic()))
            self._callers.join(deadline)
            self._groups.clear()
            self._in_flight.clear()

        # When nothing is stuck it takes milliseconds, and the interpreter may well wait for it at its exit.
        threading.Thread(target=bury, name="fenced-park", daemon=stuck).start()


def _create(options: Any, _backend_options: Any) -> FencedGroup:
    """torch calls this for every group; its generation is found through the store that torch was given."""
    origin = options.store
    while isinstance(origin, dist.PrefixStore):
        origin = origin.underlying_store
    if not isinstance(origin, GenerationStore):
        raise ValueError(f"the backend {BACKEND!r} makes groups only within Generation.form")
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    return origin.generation.make_group(options.store, options.group_id, options.group_rank, members)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
