"""Snapshots on the worker's side: copy the state into the keeper's arena, and know when the copy elsewhere is held.

A worker writes its two slots in turns. It may write one only once *every* worker's snapshot in the other is held twice;
that is what the vote of the step in between says, so ``wait_held`` comes before each vote and ``take`` after it.
"""

from __future__ import annotations

import time
from typing import Any

import ray

from checkpointing.arena import Arena, ArenaAddress
from checkpointing.snapshot import Snapshot, snapshot_nbytes, write_snapshot
from workers.calls import wait_for
from workers.fence import Fence, Fenced
from workers.host_state import HostState
from workers.plan import Order


class MappedArena:
    """The arena that a worker process writes. The next generation goes on in it when the size is the same, so that a
    recovery has no new pages to fault in; the process itself is the proof that nobody else writes there.
    """

    def __init__(self) -> None:
        self.arena: Arena | None = None

    @property
    def address(self) -> ArenaAddress | None:
        return self.arena.address if self.arena else None

    def map(self, address: ArenaAddress) -> Arena:
        """The arena at ``address``, mapped anew unless it is the one that is mapped already."""
        if self.arena is None or self.arena.address != address:
            self.unmap()
            self.arena = Arena.attach(address)
        return self.arena

    def unmap(self) -> None:
        if self.arena is not None:
            self.arena.close()
            self.arena = None


class Snapshots:
    """The snapshots of one worker in one generation."""

    def __init__(self, order: Order, state: HostState, fence: Fence, memory: MappedArena) -> None:
        self._order, self._state, self._fence = order, state, fence
        # What needs a copy comes first, so that the copy is one run of bytes.
        self._arrays = dict(sorted(state.arrays.items(), key=lambda held: held[0] not in order.copied))
        nbytes = snapshot_nbytes(self._arrays)
        opening = order.keeper.open_arena.remote(
            order.generation, order.rank, nbytes, order.buddy, memory.address, order.spared
        )
        address, self._next_slot = wait_for(opening, fence)
        self._arena = memory.map(address)
        self.last_step = order.step
        self.cost_s = 0.0  # seconds that training stood still for the last snapshot
        self._pending: ray.ObjectRef | None = None

    def take(self, step: int, meta: dict[str, Any], durable: bool) -> float:
        """Copy the state after ``step`` into the next slot; the keeper sends it on in the background.

        Returns the seconds that training stood still for it.
        """
        started = time.monotonic()
        slot, self._next_slot = self._next_slot, 1 - self._next_slot
        self._state.pull()
        with self._arena.writing(slot) as buffer:
            records = write_snapshot(buffer, self._arrays)
        order = self._order
        snapshot = Snapshot(order.generation, step, order.rank, str(order.layout), records, meta)
        self._pending = order.keeper.protect.remote(snapshot, slot, len(order.copied), durable)
        self.last_step = step
        self.cost_s = time.monotonic() - started
        return self.cost_s

    def wait_held(self) -> float:
        """Wait until the last snapshot is held by the keeper and its buddy; returns the seconds waited.

        Raises Fenced when the generation ends first, also when the buddy's node is the one that died.
        """
        started = time.monotonic()
        if self._pending is not None:
            try:
                wait_for(self._pending, self._fence)
            except ray.exceptions.RayError as error:
                cause = f"the snapshot could not be copied to another node: {str(error).splitlines()[-1]}"
                self._fence.trip(cause)
                raise Fenced(cause) from error
            self._pending = None
            self.cost_s += time.monotonic() - started
        return time.monotonic() - started
