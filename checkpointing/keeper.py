"""The owner of one node's memory tier. It outlives the node's workers.

Plain Python, called from several threads at once (a Ray actor with ``max_concurrency`` above 1). Bytes are copied,
hashed and sent outside of the lock of its tables, under a lease of the slot they lie in.

All that a keeper holds is a set of arenas, in four roles: *primary* (a local worker writes it), *copy* (of what a
worker on another node has), *parity* (of what several have), *pin* (a copy of a primary, until it is on disk). Their
slots are listed only while the ticket in the slot is the one they were registered with, so a slot that is being
rewritten, or whose writer died half-way, is never offered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from checkpointing.arena import ArenaAddress
from checkpointing.arenas import Arenas, Kept, Owner
from checkpointing.boxes import slices, volume
from checkpointing.checkpoint_file import Share
from checkpointing.durable import write_share
from checkpointing.holding import (
    DigestMismatch,
    Holding,
    HoldingKey,
    ReadRequest,
    Recipe,
    Shard,
    name_of,
    verify_record,
)
from checkpointing.pace import Pacer
from checkpointing.parity import Forming, Span, read_spans, rebuild
from checkpointing.redundancy import Code
from checkpointing.snapshot import Record, Snapshot, digest_of
from checkpointing.storage import unpaced

Call = tuple[Any, str, tuple[Any, ...]]  # keeper, method, arguments


@dataclass(frozen=True)
class Sending:
    """The next ``num_records`` of every snapshot's records go to ``keepers``, see ``redundancy.Send``.

    ``peers``: node -> keeper, of all that have a shard of the ``code``.
    """

    keepers: tuple[Any, ...]
    num_records: int
    code: Code | None
    index: int
    peers: Mapping[str, Any]


class Keeper:
    """See the module. ``call`` runs calls of other keepers' methods at once and returns what they returned, in order; a
    keeper is whatever ``open_arena`` was given.
    """

    def __init__(self, node: str, call: Callable[[Sequence[Call]], list[Any]]) -> None:
        self._node = node
        self._call = call
        self._arenas = Arenas(node)
        self._sendings: dict[tuple[int, int], Sequence[Sending]] = {}  # by generation and rank
        self._forming: dict[tuple[int, int], Forming] = {}  # by generation and number of the code
        self._peers: dict[tuple[int, int], Mapping[str, Any]] = {}

    def open_arena(
        self,
        generation: int,
        rank: int,
        nbytes: int,
        sendings: Sequence[Sending] = (),
        mapped: ArenaAddress | None = None,
        spared: tuple[int, int] | None = None,
    ) -> tuple[ArenaAddress, int]:
        """Two slots of ``nbytes`` bytes for a local worker, which maps them by the address; and which to write first.

        ``sendings`` say where the records of its snapshots go, from the first one on. ``mapped`` is the arena that the
        same process wrote in an earlier generation: it gets that one again when rank and size are as before, to begin
        with the slot that does not hold the state ``spared`` (generation, step), from which all are recovering; None
        spares all there is, in an arena of its own. Raises StaleGeneration; ValueError when memory is short.
        """
        may_replace = spared is not None
        kept = self._arenas.open(
            ("primary", generation, rank, 0), nbytes, lambda old: may_replace and old.arena.address == mapped
        )
        kept.may_replace = may_replace
        with self._arenas.lock:
            self._sendings[generation, rank] = sendings
            in_first = [(snapshot.generation, snapshot.step) for snapshot in self._arenas.in_slot(kept.arena, 0)]
        return kept.arena.address, int(spared in in_first)

    def protect(self, snapshot: Snapshot, slot: int, durable: bool = False) -> float:
        """List what the worker has just written into ``slot``; return the seconds until all that it sends on is held.

        ``durable`` also pins the bytes until ``write_durable``, since the worker rewrites the slot two snapshots later.
        Raises StaleGeneration, and whatever ``call`` raises.
        """
        begun = time.monotonic()
        with self._arenas.lock:
            self._arenas.refuse_stale(snapshot.generation)
            kept = self._arenas["primary", snapshot.generation, snapshot.rank, 0]
            assert kept.arena.ticket(slot) % 2 == 0, f"slot {slot} of rank {snapshot.rank} is still being written"
            kept.list(slot, snapshot)
            _, ticket, _ = kept.listed[slot]
        with kept.arena.lease(slot, ticket) as buffer:
            if durable:
                self._pin(snapshot, buffer[: snapshot.nbytes])
            calls = self._calls(snapshot, slot, buffer, kept.may_replace)
            if calls:
                self._call(calls)
        return time.monotonic() - begun

    def _calls(self, snapshot: Snapshot, slot: int, buffer: np.ndarray, may_replace: bool) -> list[Call]:
        calls: list[Call] = []
        first = 0
        for part, sending in enumerate(self._sendings[snapshot.generation, snapshot.rank]):
            records = snapshot.records[first : first + sending.num_records]
            first += sending.num_records
            start = records[0].start
            sent = replace(snapshot, records=tuple(replace(record, start=record.start - start) for record in records))
            data = buffer[start : start + sent.nbytes]
            for row, keeper in enumerate(sending.keepers):
                if sending.code is None:
                    calls.append((keeper, "hold", (sent, part, slot, data, may_replace)))
                else:
                    shard = Shard(sent, start)
                    calls.append((keeper, "hold_shard", (sending.code, row, sending.index, shard, data, sending.peers)))
        return calls

    def hold(self, snapshot: Snapshot, part: int, slot: int, data: np.ndarray, may_replace: bool) -> None:
        """Keep a copy of a part of another node's snapshot; its records lie in ``data`` (uint8, 1-d).

        ``may_replace``: in the arena of an older generation, unless the slot holds the same step.
        Raises StaleGeneration; DigestMismatch, after which the slot holds nothing; ValueError when memory is short.
        """

        def has_room(old: Kept) -> bool:
            return may_replace and all(other.step != snapshot.step for other in self._arenas.in_slot(old.arena, slot))

        kept = self._arenas.open(("copy", snapshot.generation, snapshot.rank, part), data.nbytes, has_room)
        if data.nbytes > kept.arena.address.nbytes:
            raise ValueError(f"rank {snapshot.rank} sent {data.nbytes} bytes for a slot of {kept.arena.address.nbytes}")
        with kept.holding:
            with self._arenas.lock:
                self._arenas.refuse_stale(snapshot.generation)  # the arena may be a later generation's by now
            with kept.arena.writing(slot) as buffer:
                buffer[: data.nbytes] = data
                self._verify("copy", snapshot, part, slot, buffer)
            with self._arenas.lock:
                self._arenas.refuse_stale(snapshot.generation)
                kept.list(slot, snapshot)

    def hold_shard(
        self, code: Code, row: int, number: int, shard: Shard, data: np.ndarray, peers: Mapping[str, Any]
    ) -> None:
        """Add shard ``number`` (``data``: uint8, 1-d) to row ``row`` of the code's parity; the last one has it listed.

        ``peers``: see ``Sending``. Raises StaleGeneration; DigestMismatch; ValueError when memory is short.
        """
        snapshot = shard.snapshot
        of = snapshot.generation, code.number
        kept = self._arenas.open(("parity", *of, row), code.nbytes)
        with kept.holding:
            with self._arenas.lock:
                self._arenas.refuse_stale(snapshot.generation)
                self._peers[of] = peers
            forming = self._forming.get(of)
            if forming is None or forming.step != snapshot.step:
                # One slot has the step before, which all members have agreed is held; the other is free.
                newest = max(kept.whole().items(), key=lambda entry: entry[1][0].step, default=(1, None))[0]
                forming = self._forming[of] = Forming(kept.arena, 1 - newest, code, row, snapshot.step)
            self._verify("shard", snapshot, number, forming.slot, data)
            forming.add(number, shard, data)
            if forming.is_complete:
                parity = forming.finish()
                with self._arenas.lock:
                    self._arenas.refuse_stale(snapshot.generation)
                    kept.list(forming.slot, *parity)
                    del self._forming[of]

    def inventory(self) -> list[Holding]:
        """Every whole snapshot on this node, in a fixed order."""
        return self._arenas.holdings()

    def read(self, requests: Sequence[ReadRequest]) -> tuple[np.ndarray, tuple[str, ...]]:
        """The requested boxes, each in C order, one after the other (uint8, 1-d), and the digest of each.

        A record is verified before any of it is served. Raises DigestMismatch or HoldingGone.
        """
        nbytes = [volume(request.box) * request.record.itemsize for request in requests]
        out = np.empty(sum(nbytes), np.uint8)
        digests, start, verified = [], 0, set()
        with ExitStack() as leases:
            buffers = self._buffers(leases, [(request.key, request.recipe, request.record) for request in requests])
            for request, length in zip(requests, nbytes, strict=True):
                key, record = request.key, request.record
                if (key, record.piece) not in verified:
                    verify_record(record, buffers[key], name_of(key), key)
                    verified.add((key, record.piece))
                target = out[start : start + length]
                box = record.array(buffers[key])[slices(request.box, record.piece)]
                target.view(record.dtype).reshape(request.box.size)[...] = box
                digests.append(digest_of(target))
                start += length
        return out, tuple(digests)

    def read_shard(self, key: HoldingKey, shard: Span, spans: Sequence[Span]) -> tuple[np.ndarray, str]:
        """Ranges of the shard that lies at ``shard`` of a holding, and the digest of all of them. For other keepers.

        Raises DigestMismatch or HoldingGone.
        """
        with ExitStack() as leases:
            buffer, snapshot = self._arenas.lease(leases, key)
            data = read_spans(snapshot.records, buffer, shard, spans, key)
        return data, digest_of(data)

    def fence(self, generation: int) -> None:
        """From now on refuse whatever an older generation wants to write."""
        self._arenas.fence(generation)

    def release(self, before_generation: int) -> None:
        """Free the memory of older generations, but for arenas in which a later one goes on."""
        with self._arenas.lock:
            tables: list[dict[tuple[int, int], Any]] = [self._sendings, self._forming, self._peers]
            for table in tables:
                for key in [key for key in table if key[0] < before_generation]:
                    del table[key]
        self._arenas.drop(lambda owner, _: owner[1] < before_generation)

    def write_durable(
        self, step: int, generation: int, location: str, shares: Sequence[Share], max_bytes_per_s: int | None = None
    ) -> list[dict[str, Any]]:
        """Write this node's shares of a checkpoint below ``location`` (see durable.py) and drop the step's pins.

        Returns manifest entries, one per file. Bytes come from pins where there are any; otherwise from arenas, which
        must then be quiescent. Raises DigestMismatch or HoldingGone, and then the checkpoint must not be committed.
        """
        wanted = [ReadRequest.of(share.holding, share.record, share.record.piece) for share in shares]
        assert all(request.key[2:4] == (generation, step) for request in wanted), "a share of another state"
        with ExitStack() as leases:
            buffers = self._buffers(leases, [(request.key, request.recipe, request.record) for request in wanted])
            try:
                pace = Pacer(max_bytes_per_s) if max_bytes_per_s is not None else unpaced
                return write_share(location, [(share, buffers[share.holding.key]) for share in shares], pace)
            finally:
                self._arenas.drop(
                    lambda owner, kept: (
                        owner[:2] == ("pin", generation)
                        and [listed[0].step for listed in kept.listed.values()] == [step]
                    )
                )

    def _buffers(
        self, leases: ExitStack, wanted: Sequence[tuple[HoldingKey, Recipe | None, Record]]
    ) -> dict[HoldingKey, np.ndarray]:
        """The bytes of holdings, by key: leased, or decoded where there is a recipe (only the records ``wanted``)."""
        buffers = {}
        for key, recipe in {key: recipe for key, recipe, _ in wanted}.items():
            if recipe is None:
                buffers[key], _ = self._arenas.lease(leases, key)
            else:
                buffers[key] = self._decode(recipe, {record for of, _, record in wanted if of == key})
        return buffers

    def _decode(self, recipe: Recipe, records: set[Record]) -> np.ndarray:
        """A buffer with these records of a shard that nobody has any more. Raises DigestMismatch or HoldingGone."""
        spans = sorted((record.start, record.start + record.nbytes) for record in records)
        peers = self._peers[recipe.sources[0].key[2], recipe.code.number]
        calls = [(peers[of.node], "read_shard", (of.key, (of.start, of.stop), spans)) for of in recipe.sources]
        found = []
        for source, (data, digest) in zip(recipe.sources, self._call(calls), strict=True):
            if digest_of(data) != digest:
                raise DigestMismatch(f"{name_of(source.key)} was damaged on its way to {self._node}", source.key)
            found.append(data)
        rebuilt = rebuild(recipe, found)
        buffer = np.empty(spans[-1][1], np.uint8)
        taken = 0
        for start, stop in spans:
            buffer[start:stop] = rebuilt[taken : taken + stop - start]
            taken += stop - start
        return buffer

    def _verify(self, what: str, snapshot: Snapshot, part: int, slot: int, buffer: np.ndarray) -> None:
        """Raise DigestMismatch unless what was sent to this node has arrived as it was."""
        key = (self._node, what, snapshot.generation, snapshot.step, snapshot.rank, slot, part)
        for record in snapshot.records:
            verify_record(record, buffer, f"{what} of rank {snapshot.rank} sent to node {self._node}", key)

    def _pin(self, snapshot: Snapshot, data: np.ndarray) -> None:
        """A rank has one pin; an older one whose checkpoint was given up goes (a writer at work keeps its memory)."""
        pinned: Owner = ("pin", snapshot.generation, snapshot.rank, 0)
        self._arenas.drop(lambda owner, _: owner == pinned)
        pin = self._arenas.open(pinned, data.nbytes)
        with pin.arena.writing(0) as buffer:
            buffer[:] = data
        with self._arenas.lock:
            pin.list(0, snapshot)
