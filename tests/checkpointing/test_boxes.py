"""Box arithmetic against element masks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.boxes import cells, describe, flat_boxes, overlap, slices, uncovered, volume, without
from checkpointing.schema import Piece

SIDE = 6


@st.composite
def boxes(draw: st.DrawFn, num_dims: int) -> Piece:
    starts = [draw(st.integers(0, SIDE - 1)) for _ in range(num_dims)]
    return Piece("t", tuple(starts), tuple(draw(st.integers(1, SIDE - start)) for start in starts))


def mask(*found: Piece) -> np.ndarray:
    total = np.zeros((SIDE,) * len(found[0].size), np.int32)
    for box in found:
        total[(..., *slices(box, Piece("t", (0,) * total.ndim, total.shape)))] += 1
    return total


@given(st.integers(0, 3).flatmap(lambda num_dims: st.lists(boxes(num_dims), min_size=2, max_size=6)))
def test_overlap_and_remainder_match_masks(found: list[Piece]) -> None:
    first, second, *_ = found
    common = overlap(first, second)
    assert (volume(common) if common else 0) == (mask(first) & mask(second)).sum()
    rest = without(first, second)
    assert len(rest) <= max(1, 2 * len(first.size))
    assert (mask(*rest, first) - mask(first) == mask(first) & (1 - mask(second))).all()
    left = uncovered(first, found[1:])
    assert (mask(*left, first) - mask(first) == mask(first) & (mask(*found[1:]) == 0)).all()


def test_describe() -> None:
    assert describe(Piece("w", (0, 8), (4, 8))) == "w[0:4, 8:16]"
    assert describe(Piece("step", (), ())) == "step[]"


@given(st.integers(0, 3).flatmap(lambda num_dims: st.lists(boxes(num_dims), min_size=1, max_size=7)))
def test_cells_are_disjoint_and_know_who_holds_them(found: list[Piece]) -> None:
    outer, *others = found
    cut = list(cells(outer, others))
    assert (mask(outer) == mask(*(cell for cell, _ in cut))).all()
    for cell, holders in cut:
        for other in others:
            inside = mask(cell) * mask(other)
            assert (inside == (mask(cell) if other in holders else 0)).all()


@given(st.integers(0, 4).flatmap(boxes), st.data())
def test_a_flat_range_is_a_few_boxes_in_order(box: Piece, data: st.DataObject) -> None:
    start, stop = sorted(data.draw(st.integers(0, volume(box))) for _ in range(2))
    parts = flat_boxes(box, start, stop)
    assert len(parts) <= max(1, 2 * len(box.size) - 1)
    numbers = np.full((SIDE,) * len(box.size), -1)
    whole = Piece("t", (0,) * numbers.ndim, numbers.shape)
    numbers[(..., *slices(box, whole))] = np.arange(volume(box)).reshape(box.size)
    joined = [number for part in parts for number in numbers[(..., *slices(part, whole))].reshape(-1)]
    assert joined == list(range(start, stop))
