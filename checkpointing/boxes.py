"""Arithmetic on boxes of one canonical tensor. A scalar is the box with no dims: volume 1, overlaps itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from checkpointing.schema import Piece

_Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, size


def volume(box: Piece) -> int:
    """Number of elements in ``box``."""
    return math.prod(box.size)


def overlap(a: Piece, b: Piece) -> Piece | None:
    """The box that ``a`` and ``b`` (of the same tensor) share, or None."""
    offset, size = [], []
    for a0, a_size, b0, b_size in zip(a.offset, a.size, b.offset, b.size, strict=True):
        start, stop = max(a0, b0), min(a0 + a_size, b0 + b_size)
        if stop <= start:
            return None
        offset.append(start)
        size.append(stop - start)
    return Piece(a.name, tuple(offset), tuple(size))


def without(box: Piece, hole: Piece) -> list[Piece]:
    """``box`` minus ``hole`` as at most 2d disjoint boxes."""
    common = overlap(box, hole)
    if common is None:
        return [box]
    left, offset, size = [], list(box.offset), list(box.size)
    for dim, (start, length) in enumerate(zip(common.offset, common.size, strict=True)):
        before, after = start - offset[dim], offset[dim] + size[dim] - (start + length)
        if before:
            left.append(Piece(box.name, tuple(offset), (*size[:dim], before, *size[dim + 1 :])))
        if after:
            after_offset = (*offset[:dim], start + length, *offset[dim + 1 :])
            left.append(Piece(box.name, after_offset, (*size[:dim], after, *size[dim + 1 :])))
        offset[dim], size[dim] = start, length
    return left


def cells(box: Piece, boxes: Iterable[Piece]) -> Iterator[tuple[Piece, list[Piece]]]:
    """Cut ``box`` at the boundaries of ``boxes``: every cell with the boxes that contain it, none for a gap.

    A sweep along one dim after the other. On a grid of n boxes it takes n * d steps; a gap is not cut further.
    """
    return _cells(box, (), (), [other for other in boxes if overlap(box, other) is not None])


def _cells(
    box: Piece, offset: tuple[int, ...], size: tuple[int, ...], holders: list[Piece]
) -> Iterator[tuple[Piece, list[Piece]]]:
    dim = len(offset)
    if dim == len(box.size):
        yield Piece(box.name, offset, size), holders
        return
    lower, upper = box.offset[dim], box.offset[dim] + box.size[dim]
    spans = [(max(lower, h.offset[dim]), min(upper, h.offset[dim] + h.size[dim])) for h in holders]
    edges = sorted({lower, upper, *(edge for span in spans for edge in span)})
    slab_at = {edge: index for index, edge in enumerate(edges)}
    slabs: list[list[Piece]] = [[] for _ in edges[:-1]]
    for holder, (start, stop) in zip(holders, spans, strict=True):
        for index in range(slab_at[start], slab_at[stop]):
            slabs[index].append(holder)
    for (start, stop), inside in zip(pairwise(edges), slabs, strict=True):
        yield from _cells(box, (*offset, start), (*size, stop - start), inside)


def uncovered(box: Piece, covers: Iterable[Piece]) -> list[Piece]:
    """The parts of ``box`` that no box in ``covers`` contains."""
    return [cell for cell, holders in cells(box, covers) if not holders]


def flat_boxes(box: Piece, start: int, stop: int) -> list[Piece]:
    """Elements [start, stop) of ``box`` in C order, as at most 2d - 1 boxes, also in that order."""
    return [Piece(box.name, *found) for found in _flat(box.offset, box.size, start, stop)]


def _flat(offset: Sequence[int], size: Sequence[int], start: int, stop: int) -> Iterator[_Box]:
    if start >= stop:
        return
    if not size:
        yield (), ()
        return
    row = math.prod(size[1:])
    (first, skipped), (last, rest) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _in_row(offset, size, first, skipped, rest)
        return
    if skipped:
        yield from _in_row(offset, size, first, skipped, row)
        first += 1
    if first < last:
        yield (offset[0] + first, *offset[1:]), (last - first, *size[1:])
    yield from _in_row(offset, size, last, 0, rest)


def _in_row(offset: Sequence[int], size: Sequence[int], row: int, start: int, stop: int) -> Iterator[_Box]:
    for inner_offset, inner_size in _flat(offset[1:], size[1:], start, stop):
        yield (offset[0] + row, *inner_offset), (1, *inner_size)


def slices(box: Piece, outer: Piece) -> tuple[slice, ...]:
    """Where ``box`` lies in the local array that holds ``outer``."""
    return tuple(
        slice(start - base, start - base + length)
        for start, base, length in zip(box.offset, outer.offset, box.size, strict=True)
    )


def describe(box: Piece) -> str:
    """``name[0:4, 8:16]``, as it appears in error sentences."""
    ranges = ", ".join(f"{start}:{start + length}" for start, length in zip(box.offset, box.size, strict=True))
    return f"{box.name}[{ranges}]"
