"""Who has which snapshot, how to ask for a part of it, and what can be wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from checkpointing.arena import ArenaAddress
from checkpointing.boxes import describe
from checkpointing.redundancy import Code
from checkpointing.schema import Piece
from checkpointing.snapshot import Record, Snapshot, digest_of

HoldingKey = tuple[Any, ...]
Role = Literal["primary", "copy", "pin", "parity", "decoded"]
Tier = Literal["memory", "disk", "s3"]
TIERS: tuple[Tier, ...] = ("memory", "disk", "s3")  # nearest first


@dataclass(frozen=True)
class Shard:
    """A shard of data: ``snapshot``'s records start where they do in it; it begins at ``start`` of its owner's slot."""

    snapshot: Snapshot
    start: int


@dataclass(frozen=True)
class Parity:
    """What is in a parity slot: row ``row`` of ``code``'s parity, of these shards of data (by number)."""

    code: Code
    row: int
    shards: tuple[tuple[int, Shard], ...]


@dataclass(frozen=True)
class Source:
    """Where a shard can be read: between ``start`` and ``stop`` of the holding with this ``key``, on ``node``."""

    number: int
    node: str
    key: HoldingKey
    start: int
    stop: int


@dataclass(frozen=True)
class Recipe:
    """How to get shard ``number`` of a code back: from ``sources``, and ``zeros`` (shards that nobody has data in)."""

    code: Code
    number: int
    sources: tuple[Source, ...]
    zeros: tuple[int, ...]


@dataclass(frozen=True)
class Holding:
    """A snapshot that a reader can find.

    node     where its bytes are; "" for files, which every node reads alike
    role     "primary" (the worker's own arena), "copy" (of a part of one, on another node), "pin" (private copy of a
             primary, kept stable until it is on disk), "parity" (no state itself: ``parity`` says of what, and its rank
             is the code's number), "decoded" (nobody has it, but the keeper of ``node`` can work it out); files are
             "primary"
    locator  memory: address of the arena, in which the bytes are in ``slot``; decoded: how; files: their path
    part     tells apart what one rank has of one role on one node
    """

    snapshot: Snapshot
    slot: int
    node: str
    role: Role
    tier: Tier
    locator: ArenaAddress | Recipe | str
    part: int = 0
    parity: Parity | None = None

    @property
    def key(self) -> HoldingKey:
        """Small and hashable; equal for equal holdings. What errors carry, so that a caller can exclude the holding."""
        if self.tier != "memory":
            return (self.tier, self.locator)
        snapshot = self.snapshot
        return (self.node, self.role, snapshot.generation, snapshot.step, snapshot.rank, self.slot, self.part)

    def __str__(self) -> str:
        return f"file {self.locator}" if self.tier != "memory" else name_of(self.key)


def name_of(key: HoldingKey) -> str:
    """How a sentence names a holding in memory."""
    node, role, _, _, rank, _, part = key
    of = f"{part} of code {rank}" if role == "parity" else f"of rank {rank}"
    return f"{role} {of} on node {node}"


@dataclass(frozen=True)
class ReadRequest:
    """The bytes of ``box`` (canonical coordinates, inside ``record.piece``) of the holding with this ``key``.

    ``recipe`` is there when the holding must be decoded.
    """

    key: HoldingKey
    record: Record
    box: Piece
    recipe: Recipe | None = None

    @classmethod
    def of(cls, holding: Holding, record: Record, box: Piece) -> ReadRequest:
        return cls(holding.key, record, box, holding.locator if isinstance(holding.locator, Recipe) else None)


class HoldingUnusable(RuntimeError):
    """Plan again without the holding named by ``key``."""

    def __init__(self, sentence: str, key: HoldingKey) -> None:
        super().__init__(sentence, key)  # both in args, so that the error survives a pickle
        self.sentence, self.key = sentence, key

    def __str__(self) -> str:
        return self.sentence


class DigestMismatch(HoldingUnusable):
    """Bytes are not those that were recorded."""


class HoldingGone(HoldingUnusable):
    """The bytes are not there any more: rewritten, released, or their process or file is gone."""


def verify_record(record: Record, buffer: Any, holder: str, key: HoldingKey) -> None:
    """Raise DigestMismatch unless the record's bytes in ``buffer`` have the record's digest."""
    data = record.data(buffer)
    if data.nbytes != record.nbytes or digest_of(data) != record.digest:
        raise DigestMismatch(f"{describe(record.piece)} is damaged in the {holder}: its digest does not match", key)
