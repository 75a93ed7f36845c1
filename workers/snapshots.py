"""Snapshots on the worker's side: copy the state into the keeper's arena, and know when the copy elsewhere is held.

A worker writes slot n % 2 for its n-th snapshot. It may do so only once snapshot n - 1 is held twice by *every* worker;
that is what the vote of the step in between says, so ``wait_held`` is called before each vote and ``take`` after it.
"""

from __future__ import annotations

import time

import ray

from checkpointing.arena import Arena
from checkpointing.snapshot import Snapshot, snapshot_nbytes, write_snapshot
from workers.device import Device
from workers.engine import Engine
from workers.fenced_group import Fence, Fenced
from workers.plan import Order

_POLL_S = 0.05


class Snapshots:
    """The snapshots of one worker in one generation."""

    def __init__(self, order: Order, engine: Engine, device: Device, fence: Fence) -> None:
        self._order, self._engine, self._device, self._fence = order, engine, device, fence
        self._state = engine.local_state()
        nbytes = snapshot_nbytes(device.host_arrays(self._state))
        address = wait_ref(order.keeper.open_arena.remote(order.generation, order.rank, nbytes, order.buddy), fence)
        self._arena = Arena.attach(address)
        self._count = 0
        self._pending: ray.ObjectRef | None = None

    def take(self, step: int, meta: dict, durable: bool) -> float:
        """Copy the state after ``step`` into the next slot; the keeper sends it on in the background.

        Returns the seconds that training stood still for it.
        """
        started = time.monotonic()
        slot = self._count % 2
        records = write_snapshot(self._arena.slot(slot), self._device.host_arrays(self._state))
        order = self._order
        snapshot = Snapshot(order.generation, step, order.rank, str(order.layout), records, meta)
        self._pending = order.keeper.protect.remote(snapshot, slot, durable)
        self._count += 1
        return time.monotonic() - started

    def wait_held(self) -> float:
        """Wait until the last snapshot is held by the keeper and its buddy; returns the seconds waited.

        Raises Fenced when the generation ends first, also when the buddy's node is the one that died.
        """
        started = time.monotonic()
        if self._pending is not None:
            try:
                wait_ref(self._pending, self._fence)
            except ray.exceptions.RayError as error:
                self._fence.trip(f"the snapshot could not be copied to the buddy node: {type(error).__name__}")
                raise Fenced(str(error)) from error
            self._pending = None
        return time.monotonic() - started

    def close(self) -> None:
        self._arena.close()


def wait_ref(ref: ray.ObjectRef, fence: Fence):
    """``ray.get`` that gives up with Fenced as soon as the fence is tripped."""
    while not ray.wait([ref], timeout=_POLL_S)[0]:
        if fence.tripped:
            raise Fenced(fence.cause)
    return ray.get(ref)
