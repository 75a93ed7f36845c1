"""Straight from shared memory of the node, or from a file, into place: no staging, each record verified on the way.

Within a node each record is verified by one of its readers, who tells the others by a mark in the arena: a state that
eight workers cut along another dim would else be digested eight times over, which takes longer than to copy it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from checkpointing.arena import Arena, ArenaAddress, ArenaLost, map_slot
from checkpointing.boxes import describe, overlap, slices
from checkpointing.holding import DigestMismatch, Holding, HoldingGone
from checkpointing.schema import Piece
from checkpointing.snapshot import Record
from checkpointing.storage import RangedFile
from checkpointing.transfer import Part

Wanted = tuple[Piece, Part]  # a part, and the destination piece that it is for

# Read, digested and copied at a time: a block stays in the processor's cache, and one from far is worth the trip.
_BLOCK_NBYTES = 1 << 20
_FAR_BLOCK_NBYTES = 32 << 20
_CLAIMED, _GOOD = 1, 2  # marks of a record: somebody verifies it; somebody has found it whole


@dataclass(frozen=True)
class OpenHolding:
    """``data[a:b]`` are bytes (uint8, 1-d) that the records of ``holding`` point into.

    ``marks``: one byte per record, shared with the other readers on the node; empty for files.
    """

    holding: Holding
    data: Any
    marks: np.ndarray

    @classmethod
    def open(cls, holding: Holding, mapped: Arena | None = None) -> OpenHolding:
        """A holding on this node, or a file. Raises HoldingGone when its process or file is not there any more.

        ``mapped`` is an arena that this process has mapped already: to map one takes about as long as to copy it.
        """
        try:
            if isinstance(holding.locator, ArenaAddress):
                if mapped is not None and mapped.address == holding.locator:
                    return cls(holding, mapped.slot(holding.slot), mapped.marks(holding.slot))
                return cls(holding, *map_slot(holding.locator, holding.slot))
            assert isinstance(holding.locator, str), f"{holding} must be asked for from its keeper"
            is_far = holding.tier == "s3"
            data = RangedFile(holding.locator) if is_far else np.memmap(holding.locator, np.uint8, mode="r")
            return cls(holding, data, np.empty(0, np.uint8))
        except (ArenaLost, OSError, ValueError) as error:  # ValueError: numpy's answer to an empty file
            raise HoldingGone(f"{holding} is gone: {error}", holding.key) from None

    def copy(self, wanted: Sequence[Wanted], into: Mapping[Piece, np.ndarray]) -> int:
        """Copy all parts (of this holding) to where they belong; returns the number of bytes read.

        Raises DigestMismatch, or HoldingGone when a file cannot be read; ``into`` is then partly filled.
        """
        by_record: dict[Piece, list[Wanted]] = {}
        for want in wanted:
            by_record.setdefault(want[1].record.piece, []).append(want)
        index_of = {record.piece: index for index, record in enumerate(self.holding.snapshot.records)}
        unverified, num_read = [], 0
        try:
            for piece, parts in by_record.items():
                record, index = parts[0][1].record, index_of[piece]
                mark = self.marks[index : index + 1]
                if mark.size and mark[0] != 0:
                    self._copy_parts(record, parts, into)
                    unverified.append((record, mark))
                    continue
                mark[:] = _CLAIMED
                num_read += self._verify(record, parts, into)
                mark[:] = _GOOD
            for record, mark in unverified:  # whoever claimed it may have died since, or have found it damaged
                if mark[0] != _GOOD:
                    num_read += self._verify(record, [], into)
        except OSError as error:
            raise HoldingGone(f"{self.holding} cannot be read: {error}", self.holding.key) from None
        return num_read

    def verify(self, record: Record) -> None:
        """Raise DigestMismatch unless the record's bytes have its digest."""
        self._verify(record, [], {})

    def _copy_parts(self, record: Record, parts: Sequence[Wanted], into: Mapping[Piece, np.ndarray]) -> None:
        whole = record.array(self.data)
        for piece, part in parts:
            store(into[piece], slices(part.box, piece), whole[slices(part.box, record.piece)])

    def _verify(self, record: Record, parts: Sequence[Wanted], into: Mapping[Piece, np.ndarray]) -> int:
        """Read the whole record block by block, copying what the parts want of each while it is in the cache."""
        limit = _BLOCK_NBYTES if isinstance(self.data, np.ndarray) else _FAR_BLOCK_NBYTES
        digest = xxhash.xxh3_128()
        num_rows, *row_size = record.piece.size or (1,)
        row_nbytes = math.prod(row_size) * record.itemsize
        step = max(1, limit // row_nbytes)
        for first in range(0, num_rows, step):
            rows = min(step, num_rows - first)
            start = record.start + first * row_nbytes
            data = np.ascontiguousarray(self.data[start : start + rows * row_nbytes])
            digest.update(data.data)
            if data.nbytes == rows * row_nbytes and parts:
                self._copy_rows(record, parts, into, first, rows, data)
        if digest.hexdigest() != record.digest:
            sentence = f"{describe(record.piece)} is damaged in the {self.holding}: its digest does not match"
            raise DigestMismatch(sentence, self.holding.key)
        return record.nbytes

    @staticmethod
    def _copy_rows(
        record: Record, parts: Sequence[Wanted], into: Mapping[Piece, np.ndarray], first: int, rows: int, data: Any
    ) -> None:
        name, offset, size = record.piece
        block = Piece(name, (offset[0] + first, *offset[1:]), (rows, *size[1:])) if size else record.piece
        array = data.view(record.dtype).reshape(block.size)
        for piece, part in parts:
            common = overlap(part.box, block)
            if common is not None:
                store(into[piece], slices(common, piece), array[slices(common, block)])


def store(target: np.ndarray, where: tuple[slice, ...], source: np.ndarray) -> None:
    assert target.dtype == source.dtype, f"state of dtype {source.dtype} cannot fill an array of {target.dtype}"
    target[where] = source
