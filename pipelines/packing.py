"""Documents into rows of equal length: best fit, nothing cut that would have fitted, every token exactly once.

A document of n tokens has n inputs and n - 1 targets: input i predicts token i + 1, its last token predicts nothing.
Inputs and targets are cut together into chunks of at most ``seq_len``, so the target of a chunk's last input is the
first input of the next chunk: each token except the document's first is predicted exactly once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.order import Permutation

IGNORED = -100
"""Target of an input that predicts nothing; the default ``ignore_index`` of torch's cross-entropy."""
PADDING = -1
"""Segment of padding. Its token is 0 (a valid id), its position 0, its target ``IGNORED``."""

Array = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Rows:
    """Packed rows: four int32 arrays [num_rows, seq_len]; ``segments`` counts the chunks of a row from 0."""

    tokens: Array
    targets: Array
    positions: Array
    segments: Array

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> Rows:
        return Rows(self.tokens[rows], self.targets[rows], self.positions[rows], self.segments[rows])

    @property
    def num_valid(self) -> int:
        """Number of inputs that predict something."""
        return int(np.count_nonzero(self.targets != IGNORED))


def padding_rows(num_rows: int, seq_len: int) -> Rows:
    """Rows without any valid token: weight 0 in a loss that sums over valid targets."""
    shape = (num_rows, seq_len)
    return Rows(
        tokens=np.zeros(shape, np.int32),
        targets=np.full(shape, IGNORED, np.int32),
        positions=np.zeros(shape, np.int32),
        segments=np.full(shape, PADDING, np.int32),
    )


def join_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, in order. Needs at least one part."""
    return Rows(
        tokens=np.concatenate([part.tokens for part in parts]),
        targets=np.concatenate([part.targets for part in parts]),
        positions=np.concatenate([part.positions for part in parts]),
        segments=np.concatenate([part.segments for part in parts]),
    )


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit-decreasing bin packing: the items (indices into ``lengths``) of each bin, in the order they were put in.

    Longest first, each into the fullest bin that still has room; ties go to the earlier item and the older bin.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), sorted; full bins leave the list
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[item]
        assert 0 < length <= capacity, f"length {length} does not fit {capacity}"
        found = bisect_left(rooms, (length, -1))
        if found < len(rooms):
            room, chosen = rooms.pop(found)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        if room > length:
            insort(rooms, (room - length, chosen))
    return bins


def pack(documents: Sequence[Array], seq_len: int, key: int) -> Rows:
    """Pack tokenised documents (each int32 [n], n >= 1, end-of-text included) into rows, in an order given by ``key``.

    Chunks share a row but not a segment; positions restart at 0 in each.
    """
    chunks: list[tuple[Array, Array]] = []
    for tokens in documents:
        targets = np.append(tokens[1:], np.int32(IGNORED))
        for start in range(0, len(tokens), seq_len):
            chunks.append((tokens[start : start + seq_len], targets[start : start + seq_len]))
    bins = best_fit([len(tokens) for tokens, _ in chunks], seq_len)
    rows = padding_rows(len(bins), seq_len)
    order = Permutation(len(bins), key)
    counting = np.arange(seq_len, dtype=np.int32)
    for row in range(len(bins)):
        start = 0
        for segment, chunk in enumerate(bins[order(row)]):
            tokens, targets = chunks[chunk]
            place = slice(start, start + len(tokens))
            rows.tokens[row, place] = tokens
            rows.targets[row, place] = targets
            rows.positions[row, place] = counting[: len(tokens)]
            rows.segments[row, place] = segment
            start = place.stop
    return rows
