"""Snapshots on the worker's side: copy the state into the keeper's arena, and know when the copy elsewhere is held.

The copy is made while the next forward and backward run, which only read the state. A worker writes its two slots in
turns. It may write one only once *every* worker's snapshot in the other is held twice; that is what the vote of the
step in between says, so ``wait_held`` comes before each vote and ``take`` after it.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray

from checkpointing.arena import Arena, ArenaAddress
from checkpointing.keeper import Sending
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
        # What is sent on comes first, so that all that goes to one keeper is one run of bytes.
        first = [piece for send in order.sends for piece in send.pieces]
        self._arrays = {piece: state.arrays[piece] for piece in dict.fromkeys([*first, *order.written])}
        nbytes = snapshot_nbytes(self._arrays)
        opening = order.keeper.open_arena.remote(
            order.generation, order.rank, nbytes, _sendings(order), memory.address, order.spared
        )
        address, self._next_slot = wait_for(opening, fence)
        self._arena = memory.map(address)
        self.last_step = order.step
        # Seconds that the last snapshot cost: the wait, and the copy, since training may want the core that made it.
        self.cost_s = 0.0
        self._thread = ThreadPoolExecutor(1, "snapshots")
        self._copying: Future[tuple[ray.ObjectRef, float]] | None = None

    def take(self, step: int, meta: dict[str, Any], durable: bool) -> None:
        """Have the state after ``step`` copied into the next slot, and sent on by the keeper, in the background.

        The state must stay as it is until ``wait_held``: forward and backward may run, the optimizer may not.
        """
        slot, self._next_slot = self._next_slot, 1 - self._next_slot
        self._copying = self._thread.submit(self._copy, step, slot, meta, durable)
        self.last_step = step

    def _copy(self, step: int, slot: int, meta: dict[str, Any], durable: bool) -> tuple[ray.ObjectRef, float]:
        """Returns what is done when the keeper and its buddy hold the snapshot, and the seconds that the copy took."""
        started = time.monotonic()
        self._state.pull(self._arrays)
        with self._arena.writing(slot) as buffer:
            records = write_snapshot(buffer, self._arrays)
        order = self._order
        snapshot = Snapshot(order.generation, step, order.rank, str(order.layout), records, meta)
        pending = order.keeper.protect.remote(snapshot, slot, durable)
        return pending, time.monotonic() - started

    def wait_held(self) -> float:
        """Wait until the last snapshot is held by the keeper and its buddy; returns the seconds waited.

        Raises Fenced when the generation ends first, also when the buddy's node is the one that died.
        """
        started = time.monotonic()
        if self._copying is not None:
            pending, copy_s = self._copying.result()
            copied = time.monotonic()
            try:
                wait_for(pending, self._fence)
            except ray.exceptions.RayError as error:
                cause = f"the snapshot could not be copied to another node: {str(error).splitlines()[-1]}"
                self._fence.trip(cause)
                raise Fenced(cause) from error
            self._copying = None
            self.cost_s = copy_s + time.monotonic() - copied
        return time.monotonic() - started

    def close(self) -> None:
        """Let a copy that has begun come to its end: it may be what the next generation starts from."""
        self._thread.shutdown()


def _sendings(order: Order) -> tuple[Sending, ...]:
    """What the keeper is to send on, with the keepers in place of their nodes."""
    return tuple(
        Sending(
            tuple(order.keepers[node] for node in send.nodes),
            len(send.pieces),
            send.code,
            send.index,
            {node: order.keepers[node] for node in send.code.nodes} if send.code else {},
        )
        for send in order.sends
    )
