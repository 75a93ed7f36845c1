"""Arithmetic on boxes of one canonical tensor. A scalar is the box with no dims: volume 1, overlaps itself."""

from __future__ import annotations

import math
from collections.abc import Iterable

from checkpointing.schema import Piece


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


def uncovered(box: Piece, covers: Iterable[Piece]) -> list[Piece]:
    """The parts of ``box`` that no box in ``covers`` contains."""
    rest = [box]
    for cover in covers:
        if not rest:
            break
        rest = [part for old in rest for part in without(old, cover)]
    return rest


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
