"""Who has which snapshot, how to ask for a part of it, and what can be wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from checkpointing.arena import ArenaAddress
from checkpointing.boxes import describe
from checkpointing.schema import Piece
from checkpointing.snapshot import Record, Snapshot, digest_of

HoldingKey = tuple[Any, ...]
Tier = Literal["memory", "disk", "s3"]
TIERS: tuple[Tier, ...] = ("memory", "disk", "s3")  # nearest first


@dataclass(frozen=True)
class Holding:
    """A snapshot that a reader can find.

    node     where its bytes are; "" for files, which every node reads alike
    role     "primary" (the worker's own arena), "copy" (its buddy's), "pin" (private copy of a primary, kept stable
             until it is on disk); files are "primary"
    locator  memory: address of the arena, in which the bytes are in ``slot``; disk and s3: path of the file
    """

    snapshot: Snapshot
    slot: int
    node: str
    role: Literal["primary", "copy", "pin"]
    tier: Tier
    locator: ArenaAddress | str

    @property
    def key(self) -> HoldingKey:
        """Small and hashable; equal for equal holdings. What errors carry, so that a caller can exclude the holding."""
        if self.tier != "memory":
            return (self.tier, self.locator)
        return (self.node, self.role, self.snapshot.generation, self.snapshot.step, self.snapshot.rank, self.slot)

    def __str__(self) -> str:
        if self.tier != "memory":
            return f"file {self.locator}"
        return f"{self.role} of rank {self.snapshot.rank} on node {self.node}"


@dataclass(frozen=True)
class ReadRequest:
    """The bytes of ``box`` (canonical coordinates, inside ``record.piece``) of the holding with this ``key``."""

    key: HoldingKey
    record: Record
    box: Piece


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
