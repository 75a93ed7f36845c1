"""The owner of one node's memory tier. It outlives the node's workers.

Plain Python, called from several threads at once (a Ray actor with ``max_concurrency`` above 1). One lock guards the
tables; bytes are copied, hashed and sent outside of it, under a lease of the slot they lie in.

All that a keeper holds is a set of arenas, in three roles: *primary* (a local worker writes it), *copy* (what a worker
on another node protected with us), *pin* (a copy of a primary that stays until it is on disk). Their slots are listed
only while the ticket in the slot is the one they were registered with, so a slot that is being rewritten, or whose
writer died half-way, is never offered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from checkpointing.arena import Arena, ArenaAddress, SlotRewritten
from checkpointing.boxes import slices, volume
from checkpointing.checkpoint_file import Share
from checkpointing.durable import write_share
from checkpointing.holding import Holding, HoldingGone, HoldingKey, ReadRequest, verify_record
from checkpointing.pace import Pacer
from checkpointing.snapshot import Snapshot, digest_of
from checkpointing.storage import unpaced

Role = Literal["primary", "copy", "pin"]
CallHold = Callable[[Any, Snapshot, int, np.ndarray, bool], None]


class StaleGeneration(RuntimeError):
    """The caller belongs to a generation that was fenced off."""


@dataclass
class _Kept:
    """An arena and which snapshot each slot holds, with the ticket it was registered under.

    A later generation may go on in the same arena: each has a table of its own then, and ``holding`` in common.
    """

    arena: Arena
    buddy: Any = None
    may_replace: bool = False  # copies of the snapshots in it may go where those of older generations are
    listed: dict[int, tuple[Snapshot, int]] = field(default_factory=dict)
    holding: threading.Lock = field(default_factory=threading.Lock)  # one copy at a time is written here

    def whole(self) -> dict[int, Snapshot]:
        """The snapshots whose slots have not been rewritten since."""
        listed = sorted(self.listed.items(), key=lambda item: item[0])
        return {slot: snapshot for slot, (snapshot, ticket) in listed if self.arena.ticket(slot) == ticket}


class Keeper:
    """See the module. ``call_hold(buddy, *arguments)`` runs ``hold`` on another keeper and returns once that
    has acknowledged; ``buddy`` is whatever ``open_arena`` was given.
    """

    def __init__(self, node: str, call_hold: CallHold) -> None:
        self._node = node
        self._call_hold = call_hold
        self._lock = threading.Lock()
        self._allocating = threading.Lock()  # memory is budgeted by one thread at a time
        self._oldest_generation = 0
        self._kept: dict[tuple[Role, int, int], _Kept] = {}  # by role, generation, rank

    def open_arena(
        self,
        generation: int,
        rank: int,
        nbytes: int,
        buddy: Any,
        mapped: ArenaAddress | None = None,
        spared: tuple[int, int] | None = None,
    ) -> tuple[ArenaAddress, int]:
        """Two slots of ``nbytes`` bytes for a local worker, which maps them by the address; and which to write first.

        ``buddy`` is the keeper that will hold copies, or None. ``mapped`` is the arena that the same process wrote in
        an earlier generation: it gets that one again when rank and size are as before, to begin with the slot that does
        not hold the state ``spared`` (generation, step), from which all are recovering; None spares all there is, in an
        arena of its own. Raises StaleGeneration; ValueError when the node has not enough memory.
        """
        may_replace = spared is not None
        kept = self._open("primary", generation, rank, nbytes, lambda old: may_replace and old.arena.address == mapped)
        kept.buddy, kept.may_replace = buddy, may_replace
        with self._lock:
            in_first = [(snapshot.generation, snapshot.step) for snapshot in self._in_slot(kept.arena, 0)]
        return kept.arena.address, int(spared in in_first)

    def protect(self, snapshot: Snapshot, slot: int, num_copied: int, durable: bool = False) -> float:
        """List what the worker has just written into ``slot``; return the seconds that it took to be held twice.

        The first ``num_copied`` records go to the buddy: those that no replica elsewhere holds. ``durable`` also
        pins the bytes until ``write_durable``, since the worker rewrites the slot two snapshots later. Raises
        StaleGeneration, and whatever ``call_hold`` raises.
        """
        begun = time.monotonic()
        with self._lock:
            self._refuse_stale(snapshot.generation)
            kept = self._kept["primary", snapshot.generation, snapshot.rank]
            ticket = kept.arena.ticket(slot)
            assert ticket % 2 == 0, f"slot {slot} of rank {snapshot.rank} is still being written"
            kept.listed[slot] = (snapshot, ticket)
        with kept.arena.lease(slot, ticket) as buffer:
            if durable:
                self._pin(snapshot, buffer[: snapshot.nbytes])
            if kept.buddy is not None and num_copied:
                copied = replace(snapshot, records=snapshot.records[:num_copied])
                self._call_hold(kept.buddy, copied, slot, buffer[: copied.nbytes], kept.may_replace)
        return time.monotonic() - begun

    def hold(self, snapshot: Snapshot, slot: int, data: np.ndarray, may_replace: bool) -> None:
        """Keep a copy of another node's snapshot (``data``: its slot's first ``snapshot.nbytes`` bytes, uint8).

        ``may_replace``: in the arena of an older generation, unless the slot holds the same step.
        Raises StaleGeneration; DigestMismatch, after which the slot holds nothing; ValueError when memory is short.
        """

        def has_room(old: _Kept) -> bool:
            return may_replace and all(other.step != snapshot.step for other in self._in_slot(old.arena, slot))

        kept = self._open("copy", snapshot.generation, snapshot.rank, data.nbytes, has_room)
        if data.nbytes > kept.arena.address.nbytes:
            raise ValueError(f"rank {snapshot.rank} sent {data.nbytes} bytes for a slot of {kept.arena.address.nbytes}")
        key = (self._node, "copy", snapshot.generation, snapshot.step, snapshot.rank, slot)
        with kept.holding:
            with self._lock:
                self._refuse_stale(snapshot.generation)  # the arena may be a later generation's by now
            with kept.arena.writing(slot) as buffer:
                buffer[: data.nbytes] = data
                for record in snapshot.records:
                    verify_record(record, buffer, f"copy of rank {snapshot.rank} sent to node {self._node}", key)
            with self._lock:
                self._refuse_stale(snapshot.generation)
                kept.listed[slot] = (snapshot, kept.arena.ticket(slot))

    def inventory(self) -> list[Holding]:
        """Every whole snapshot on this node, in a fixed order."""
        with self._lock:
            return [
                Holding(snapshot, slot, self._node, role, "memory", kept.arena.address)
                for (role, _, _), kept in sorted(self._kept.items(), key=lambda item: item[0])
                for slot, snapshot in kept.whole().items()
            ]

    def read(self, requests: Sequence[ReadRequest]) -> tuple[np.ndarray, tuple[str, ...]]:
        """The requested boxes, each in C order, one after the other (uint8, 1-d), and the digest of each.

        A record is verified before any of it is served. Raises DigestMismatch or HoldingGone.
        """
        nbytes = [volume(request.box) * request.record.itemsize for request in requests]
        out = np.empty(sum(nbytes), np.uint8)
        digests, start, verified = [], 0, set()
        with ExitStack() as leases:
            buffers: dict[HoldingKey, np.ndarray] = {}
            for request, length in zip(requests, nbytes, strict=True):
                key, record = request.key, request.record
                if key not in buffers:
                    buffers[key] = self._lease(leases, key)
                if (key, record.piece) not in verified:
                    verify_record(record, buffers[key], f"{key[1]} of rank {key[4]} on node {self._node}", key)
                    verified.add((key, record.piece))
                target = out[start : start + length]
                box = record.array(buffers[key])[slices(request.box, record.piece)]
                target.view(record.dtype).reshape(request.box.size)[...] = box
                digests.append(digest_of(target))
                start += length
        return out, tuple(digests)

    def fence(self, generation: int) -> None:
        """From now on refuse whatever an older generation wants to write."""
        with self._lock:
            self._oldest_generation = max(self._oldest_generation, generation)

    def release(self, before_generation: int) -> None:
        """Free the memory of older generations, but for arenas in which a later one goes on."""
        with self._lock:
            old = [self._kept.pop(key) for key in [key for key in self._kept if key[1] < before_generation]]
            in_use = [kept.arena for kept in self._kept.values()]
        # Outside of the lock, since freeing takes long enough for a keeper to seem dead. Nobody finds these any more.
        for arena in {id(kept.arena): kept.arena for kept in old}.values():
            if all(arena is not other for other in in_use):
                arena.close()

    def write_durable(
        self, step: int, generation: int, location: str, shares: Sequence[Share], max_bytes_per_s: int | None = None
    ) -> list[dict[str, Any]]:
        """Write this node's shares of a checkpoint below ``location`` (see durable.py) and drop the step's pins.

        Returns manifest entries, one per file. Bytes come from pins where there are any; otherwise from arenas, which
        must then be quiescent. Raises DigestMismatch or HoldingGone, and then the checkpoint must not be committed.
        """
        with ExitStack() as leases:
            buffers = {share.holding.key: np.empty(0, np.uint8) for share in shares}
            for key in buffers:
                assert key[2:4] == (generation, step), f"a share of another state: {key}"
                buffers[key] = self._lease(leases, key)
            try:
                pace = Pacer(max_bytes_per_s) if max_bytes_per_s is not None else unpaced
                return write_share(location, [(share, buffers[share.holding.key]) for share in shares], pace)
            finally:
                self._unpin(generation, step)

    def _open(
        self, role: Role, generation: int, rank: int, nbytes: int, may_go_on_in: Callable[[_Kept], bool]
    ) -> _Kept:
        """The arena of this role, generation and rank. When it is new, an older one of the same role and size that
        ``may_go_on_in`` allows is taken over: its pages are in memory already.
        """
        with self._allocating:
            with self._lock:
                self._refuse_stale(generation)
                kept = self._kept.get((role, generation, rank))
                if kept is None:
                    kept = next(
                        (
                            _Kept(old.arena, holding=old.holding)
                            for (other_role, other_generation, other_rank), old in self._kept.items()
                            if (other_role, other_rank) == (role, rank)
                            and other_generation < generation
                            and old.arena.address.nbytes == nbytes
                            and may_go_on_in(old)
                        ),
                        None,
                    )
                if kept is not None:
                    self._kept[role, generation, rank] = kept
                    return kept
            kept = _Kept(Arena.create(nbytes, num_slots=1 if role == "pin" else 2))
            with self._lock:
                self._kept[role, generation, rank] = kept
            return kept

    def _in_slot(self, arena: Arena, slot: int) -> list[Snapshot]:
        """What is whole in a slot, as each generation that uses the arena has listed it; call it under the lock."""
        tables = [kept.whole() for kept in self._kept.values() if kept.arena is arena]
        return [table[slot] for table in tables if slot in table]

    def _pin(self, snapshot: Snapshot, data: np.ndarray) -> None:
        """A rank has one pin; an older one whose checkpoint was given up goes (a writer at work keeps its memory)."""
        with self._lock:
            abandoned = self._kept.pop(("pin", snapshot.generation, snapshot.rank), None)
        if abandoned is not None:
            abandoned.arena.close()
        pin = self._open("pin", snapshot.generation, snapshot.rank, data.nbytes, lambda old: False)
        with pin.arena.writing(0) as buffer:
            buffer[:] = data
        with self._lock:
            pin.listed[0] = (snapshot, pin.arena.ticket(0))

    def _unpin(self, generation: int, step: int) -> None:
        with self._lock:
            for (role, pinned_generation, rank), kept in list(self._kept.items()):
                steps = [snapshot.step for snapshot, _ in kept.listed.values()]
                if role == "pin" and pinned_generation == generation and steps == [step]:
                    self._kept.pop((role, generation, rank)).arena.close()

    def _lease(self, leases: ExitStack, key: HoldingKey) -> np.ndarray:
        """The bytes of the holding with this key, which stay as they are until ``leases`` ends."""
        _, role, generation, step, rank, slot = key
        with self._lock:
            kept = self._kept.get((role, generation, rank))
            snapshot, ticket = kept.listed.get(slot, (None, 0)) if kept else (None, 0)
        try:
            if kept is None or snapshot is None or snapshot.step != step:
                raise SlotRewritten("released or rewritten")
            return leases.enter_context(kept.arena.lease(slot, ticket))
        except SlotRewritten as error:
            sentence = f"node {self._node} no longer has the {role} of rank {rank} at step {step}: {error}"
            raise HoldingGone(sentence, key) from None

    def _refuse_stale(self, generation: int) -> None:
        if generation < self._oldest_generation:
            raise StaleGeneration(
                f"node {self._node} is at generation {self._oldest_generation} and refuses generation {generation}"
            )
