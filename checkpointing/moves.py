"""From a plan to reads: what one destination takes from one holding, as byte runs and in waves that fit into memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from checkpointing.boxes import volume
from checkpointing.holding import Holding, HoldingKey
from checkpointing.schema import Piece
from checkpointing.snapshot import Record
from checkpointing.transfer import Fetch, Part


@dataclass(frozen=True)
class Move:
    """All that one destination takes from one holding (in one wave), in the order of its bytes there.

    ``parts`` are pairs (destination piece, part); each part lies inside its piece.
    """

    holding: Holding
    parts: tuple[tuple[Piece, Part], ...]

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(part) for _, part in self.parts)

    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """(starts, lengths) in bytes of the holding's buffer, neighbours joined: what a ranged read asks for.

        They hold the bytes of the parts one after the other, each in C order.
        """
        found = [byte_runs(part.record, part.box) for _, part in self.parts]
        starts = np.concatenate([starts for starts, _ in found])
        lengths = np.concatenate([np.full(len(starts), length) for starts, length in found])
        first = np.concatenate([[True], starts[1:] != (starts + lengths)[:-1]])
        return starts[first], np.add.reduceat(lengths, np.flatnonzero(first))


def moves(fetches: Iterable[Fetch]) -> tuple[Move, ...]:
    """One rank's fetches, by holding; the nearest kind first as the plan has them, then by the holding's key."""
    taken: dict[HoldingKey, list[tuple[Piece, Part]]] = defaultdict(list)
    for piece, parts in fetches:
        for part in parts:
            taken[part.holding.key].append((piece, part))
    keys = sorted(taken, key=lambda key: (not taken[key][0][1].local, tuple(map(str, key))))
    return tuple(
        Move(
            taken[key][0][1].holding, tuple(sorted(taken[key], key=lambda entry: (entry[1].record.start, entry[1].box)))
        )
        for key in keys
    )


def waves(planned: Iterable[Move], budget_nbytes: int) -> Iterator[tuple[Move, ...]]:
    """Cut moves into waves of at most ``budget_nbytes``, the memory that a destination stages; large parts are split.

    A part is never cut below one element, so a budget smaller than that is exceeded by it.
    """
    wave: list[Move] = []
    room = budget_nbytes
    for move in planned:
        parts: list[tuple[Piece, Part]] = []
        for piece, whole in move.parts:
            for box in split(whole.box, max(1, budget_nbytes // whole.record.itemsize)):
                part = whole._replace(box=box)
                if _nbytes(part) > room and (wave or parts):
                    yield (*wave, *([Move(move.holding, tuple(parts))] if parts else []))
                    wave, parts, room = [], [], budget_nbytes
                parts.append((piece, part))
                room -= _nbytes(part)
        if parts:
            wave.append(Move(move.holding, tuple(parts)))
    if wave:
        yield tuple(wave)


def split(box: Piece, num_elements: int) -> Iterator[Piece]:
    """``box`` in C order as boxes of at most ``num_elements`` , cut along the outermost dims."""
    if volume(box) <= num_elements:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.size) if size > 1)
    rows = max(1, num_elements // math.prod(box.size[dim + 1 :]))
    for first in range(0, box.size[dim], rows):
        offset = (*box.offset[:dim], box.offset[dim] + first, *box.offset[dim + 1 :])
        size = (*box.size[:dim], min(rows, box.size[dim] - first), *box.size[dim + 1 :])
        yield from split(Piece(box.name, offset, size), num_elements)


def byte_runs(record: Record, box: Piece) -> tuple[np.ndarray, int]:
    """(starts, length): the equally long runs of bytes that ``box`` has in the buffer of ``record``, in C order."""
    shape, num_dims = record.piece.size, len(box.size)
    inner = num_dims  # dims from here on are whole, so that rows of the dim before follow one another
    while inner > 0 and box.size[inner - 1] == shape[inner - 1]:
        inner -= 1
    start = max(inner - 1, 0)
    length = math.prod(box.size[start:]) * record.itemsize
    starts = np.array([record.start], np.int64)
    for dim in range(num_dims):
        first, stride = box.offset[dim] - record.piece.offset[dim], math.prod(shape[dim + 1 :]) * record.itemsize
        rows = np.arange(box.size[dim] if dim < start else 1, dtype=np.int64)
        starts = (starts[:, None] + (first + rows) * stride).reshape(-1)
    return starts, length


def _nbytes(part: Part) -> int:
    return volume(part.box) * part.record.itemsize
