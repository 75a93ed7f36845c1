"""One worker's state at one step, as bytes in a slot of an arena and a table of what lies where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from checkpointing.boxes import volume
from checkpointing.schema import Piece

ALIGNMENT = 64  # bytes; a cache line, and more than any dtype needs


@dataclass(frozen=True)
class Record:
    """Where one piece lies: ``nbytes`` bytes from ``start`` of its buffer, C order, ``digest`` (xxh3-128, hex) of them.

    ``dtype`` is a numpy name. numpy has no bfloat16: such a state is passed as uint16 and recorded as "uint16"; only
    ``TensorSpec.dtype`` says what the bits mean.
    """

    piece: Piece
    dtype: str
    start: int
    nbytes: int
    digest: str

    def data(self, buffer: np.ndarray) -> np.ndarray:
        """The record's bytes in ``buffer`` (uint8, 1-d), as a view."""
        return buffer[self.start : self.start + self.nbytes]

    def array(self, buffer: np.ndarray) -> np.ndarray:
        """The record as a view of shape ``piece.size``; only for bytes that were verified."""
        return self.data(buffer).view(self.dtype).reshape(self.piece.size)

    @property
    def itemsize(self) -> int:
        return self.nbytes // volume(self.piece)


@dataclass(frozen=True)
class Snapshot:
    """One worker's state at one step. ``meta`` is small JSON (cursor, schedule …), equal on all ranks of the step."""

    generation: int
    step: int
    rank: int
    layout: str
    records: tuple[Record, ...]
    meta: dict[str, Any] = field(hash=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the slot that are in use, from 0."""
        return max((record.start + record.nbytes for record in self.records), default=0)


def digest_of(data: np.ndarray) -> str:
    """xxh3-128 of a contiguous array's bytes, hex."""
    return xxhash.xxh3_128(data.data if data.size else b"").hexdigest()


def snapshot_nbytes(state: Mapping[Piece, np.ndarray]) -> int:
    """Bytes that ``write_snapshot`` needs for ``state``."""
    return sum(aligned(array.nbytes) for array in state.values())


def write_snapshot(buffer: np.ndarray, state: Mapping[Piece, np.ndarray]) -> tuple[Record, ...]:
    """Copy ``state`` (arrays of shape ``piece.size``, any strides) into ``buffer`` (uint8, 1-d); return where it lies.

    Raises ValueError when the buffer is too small. Write inside ``arena.writing(slot)``.
    """
    if buffer.nbytes < snapshot_nbytes(state):
        raise ValueError(f"the snapshot needs {snapshot_nbytes(state)} bytes but its slot has {buffer.nbytes}")
    records, start = [], 0
    for piece, array in state.items():
        assert array.shape == piece.size, f"{piece} got an array of shape {array.shape}"
        target = buffer[start : start + array.nbytes]
        target.view(array.dtype).reshape(array.shape)[...] = array
        records.append(Record(piece, array.dtype.name, start, array.nbytes, digest_of(target)))
        start += aligned(array.nbytes)
    return tuple(records)


def aligned(nbytes: int) -> int:
    """What ``nbytes`` bytes take in a slot."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
