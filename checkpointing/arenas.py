"""The table of a keeper's arenas: which there are, what is whole in their slots, and leases to read them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from checkpointing.arena import Arena, SlotRewritten
from checkpointing.holding import Holding, HoldingGone, HoldingKey, Parity, Role, name_of
from checkpointing.snapshot import Snapshot

Owner = tuple[Role, int, int, int]  # role, generation, rank (of parity: the code's number), part


class StaleGeneration(RuntimeError):
    """The caller belongs to a generation that was fenced off."""


@dataclass
class Kept:
    """An arena and which snapshot each slot holds, with the ticket it was registered under.

    A later generation may go on in the same arena: each has a table of its own then, and ``holding`` in common.
    """

    arena: Arena
    may_replace: bool = False  # copies of the snapshots in it may go where those of older generations are
    listed: dict[int, tuple[Snapshot, int, Parity | None]] = field(default_factory=dict)
    holding: threading.Lock = field(default_factory=threading.Lock)  # one at a time writes what others send here

    def list(self, slot: int, snapshot: Snapshot, parity: Parity | None = None) -> None:
        """What is in ``slot`` from now on, until it is rewritten."""
        self.listed[slot] = snapshot, self.arena.ticket(slot), parity

    def whole(self) -> dict[int, tuple[Snapshot, Parity | None]]:
        """What is in the slots that have not been rewritten since."""
        listed = sorted(self.listed.items(), key=lambda item: item[0])
        return {
            slot: (snapshot, parity) for slot, (snapshot, ticket, parity) in listed if self.arena.ticket(slot) == ticket
        }


class Arenas:
    """What ``node`` keeps, by owner. ``lock`` guards the tables; memory is budgeted by one thread at a time."""

    def __init__(self, node: str) -> None:
        self.lock = threading.Lock()
        self._node = node
        self._allocating = threading.Lock()
        self._oldest_generation = 0
        self._kept: dict[Owner, Kept] = {}

    def __getitem__(self, owner: Owner) -> Kept:
        return self._kept[owner]

    def open(self, owner: Owner, nbytes: int, may_go_on_in: Callable[[Kept], bool] = lambda old: False) -> Kept:
        """The owner's arena. When it is new, an older one of the same role, rank, part and size that ``may_go_on_in``
        allows is taken over: its pages are in memory already. Raises StaleGeneration; ValueError when memory is short.
        """
        role, generation, *who = owner
        with self._allocating:
            with self.lock:
                self.refuse_stale(generation)
                kept = self._kept.get(owner)
                if kept is None:
                    kept = next(
                        (
                            Kept(old.arena, holding=old.holding)
                            for (other_role, other_generation, *other), old in self._kept.items()
                            if other_role == role
                            and other == who
                            and other_generation < generation
                            and old.arena.address.nbytes == nbytes
                            and may_go_on_in(old)
                        ),
                        None,
                    )
                if kept is not None:
                    self._kept[owner] = kept
                    return kept
            kept = Kept(Arena.create(nbytes, num_slots=1 if role == "pin" else 2))
            with self.lock:
                self._kept[owner] = kept
            return kept

    def in_slot(self, arena: Arena, slot: int) -> list[Snapshot]:
        """What is whole in a slot, as each generation that uses the arena has listed it; call it under the lock."""
        tables = [kept.whole() for kept in self._kept.values() if kept.arena is arena]
        return [table[slot][0] for table in tables if slot in table]

    def holdings(self) -> list[Holding]:
        """Every whole snapshot, in a fixed order."""
        with self.lock:
            return [
                Holding(snapshot, slot, self._node, role, "memory", kept.arena.address, part, parity)
                for (role, _, _, part), kept in sorted(self._kept.items(), key=lambda item: item[0])
                for slot, (snapshot, parity) in kept.whole().items()
            ]

    def lease(self, leases: ExitStack, key: HoldingKey) -> tuple[np.ndarray, Snapshot]:
        """Bytes and snapshot of the holding with this key; they stay as they are until ``leases`` ends.

        Raises HoldingGone.
        """
        _, role, generation, step, rank, slot, part = key
        with self.lock:
            kept = self._kept.get((role, generation, rank, part))
            snapshot, ticket, _ = kept.listed.get(slot, (None, 0, None)) if kept else (None, 0, None)
        try:
            if kept is None or snapshot is None or snapshot.step != step:
                raise SlotRewritten("released or rewritten")
            return leases.enter_context(kept.arena.lease(slot, ticket)), snapshot
        except SlotRewritten as error:
            what = name_of(key).removesuffix(f" on node {self._node}")
            raise HoldingGone(f"node {self._node} no longer has the {what} at step {step}: {error}", key) from None

    def fence(self, generation: int) -> None:
        with self.lock:
            self._oldest_generation = max(self._oldest_generation, generation)

    def refuse_stale(self, generation: int) -> None:
        """Raise StaleGeneration for an older generation than the fence allows; call it under the lock."""
        if generation < self._oldest_generation:
            raise StaleGeneration(
                f"node {self._node} is at generation {self._oldest_generation} and refuses generation {generation}"
            )

    def drop(self, which: Callable[[Owner, Kept], bool]) -> None:
        """Free the memory of some, but for arenas in which others go on (and for those that still read it)."""
        with self.lock:
            gone = [
                self._kept.pop(owner) for owner in [owner for owner, kept in self._kept.items() if which(owner, kept)]
            ]
            in_use = [kept.arena for kept in self._kept.values()]
        # Outside of the lock, since freeing takes long enough for a keeper to seem dead. Nobody finds these any more.
        for arena in {id(kept.arena): kept.arena for kept in gone}.values():
            if all(arena is not other for other in in_use):
                arena.close()
