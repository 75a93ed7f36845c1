"""Two checkpoints compared tensor by tensor, whatever their layouts are, in bounded memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from checkpointing.boxes import overlap, slices
from checkpointing.durable import checkpoint_holdings, read_manifest
from checkpointing.local_read import OpenHolding
from checkpointing.moves import split
from checkpointing.schema import Piece
from checkpointing.snapshot import Record

_BLOCK_ELEMENTS = 1 << 20
_FILES_OPEN = 64  # of a side; a checkpoint of many ranks has more files than a process may open
_SAME_SIZED_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor differs. ``note`` says what cannot be compared; else so many of ``num_elements`` differ.

    ``largest`` is the largest absolute difference between finite values (exact for integers; None where there are none,
    where it is beyond float64, or where the dtype has no arithmetic here). ``num_not_finite`` of those that differ are
    NaN or infinite on a side. ``first`` is the index of the first element that differs.
    """

    name: str
    num_elements: int = 0
    num_differing: int = 0
    largest: float | int | None = None
    num_not_finite: int = 0
    first: tuple[int, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        if self.note:
            return f"{self.name}: {self.note}"
        by = "" if self.largest is None else f", by at most {self.largest:.3g}"
        if self.num_not_finite:
            by += f", {self.num_not_finite} of them NaN or infinite on a side"
        return (
            f"{self.name}: {self.num_differing} of {self.num_elements} elements differ{by}, first at {list(self.first)}"
        )


def differences(a: str, b: str, rtol: float | None) -> Iterator[TensorDifference]:
    """What differs between the checkpoints at ``a`` and ``b``; nothing when they are equal.

    Without ``rtol`` (finite) bits are compared (NaNs and signed zeros too). With it elements are equal when
    |a - b| <= rtol * |b|, or when both are NaN or the same infinity; the difference of integers is exact. Every byte is
    verified first. Raises ValueError for a damaged manifest, DigestMismatch or HoldingGone for damaged data.
    """
    ours, theirs = _Opened(a), _Opened(b)
    for name in sorted(ours.tensors.keys() | theirs.tensors.keys()):
        if name not in ours.tensors or name not in theirs.tensors:
            yield TensorDifference(name, note=f"only in {a if name in ours.tensors else b}")
            continue
        (shape, dtype), (other_shape, other_dtype) = ours.tensors[name], theirs.tensors[name]
        if (shape, dtype) != (other_shape, other_dtype):
            yield TensorDifference(name, note=f"{dtype}{list(shape)} is not {other_dtype}{list(other_shape)}")
            continue
        found = _compare(name, shape, dtype, ours, theirs, rtol)
        if found is not None:
            yield found


class _Opened:
    """A checkpoint's tensors, and who has which box of them."""

    def __init__(self, location: str) -> None:
        tensors = read_manifest(location)["tensors"]
        self.tensors = {name: (tuple(tensor["shape"]), tensor["dtype"]) for name, tensor in tensors.items()}
        self.holders: Mapping[str, list[tuple[int, Record]]] = defaultdict(list)
        holdings = checkpoint_holdings(location)
        for index, holding in enumerate(holdings):
            for record in holding.snapshot.records:
                self.holders[record.piece.name].append((index, record))
        self.open = lru_cache(_FILES_OPEN)(lambda index: OpenHolding.open(holdings[index]))

    def verify(self, name: str) -> None:
        for index, record in self.holders[name]:
            self.open(index).verify(record)


def _compare(
    name: str, shape: tuple[int, ...], dtype: str, ours: _Opened, theirs: _Opened, rtol: float | None
) -> TensorDifference | None:
    ours.verify(name)
    theirs.verify(name)
    num_differing = num_not_finite = 0
    largest: float | int | None = None
    firsts = []
    for box, a, b in _blocks(name, ours, theirs):
        x, y = _numbers(a, dtype), _numbers(b, dtype)
        if rtol is None or x is None or y is None:
            bits = _SAME_SIZED_BITS[a.itemsize]
            differing = a.view(bits) != b.view(bits)
        else:
            differing = ~_close(x, y, rtol)
        if not differing.any():
            continue
        num_differing += int(np.count_nonzero(differing))
        firsts.append(tuple(int(i) + o for i, o in zip(np.argwhere(differing)[0], box.offset, strict=True)))
        if x is not None and y is not None:
            x, y = x[differing], y[differing]
            finite = np.isfinite(x) & np.isfinite(y)
            num_not_finite += int(np.count_nonzero(~finite))
            if finite.any():
                largest = max(largest or 0, _distance(x[finite], y[finite]).max().item())
    if not num_differing:
        return None
    if largest is not None and not math.isfinite(largest):
        largest = None
    return TensorDifference(name, math.prod(shape), num_differing, largest, num_not_finite, min(firsts))


def _blocks(name: str, ours: _Opened, theirs: _Opened) -> Iterator[tuple[Piece, np.ndarray, np.ndarray]]:
    """Every element once: a box and both sides' arrays of it."""
    for index, record in ours.holders[name]:
        for other, other_record in theirs.holders[name]:
            common = overlap(record.piece, other_record.piece)
            if common is not None:
                for box in split(common, _BLOCK_ELEMENTS):
                    yield box, _array(ours.open(index), record, box), _array(theirs.open(other), other_record, box)


def _array(opened: OpenHolding, record: Record, box: Piece) -> np.ndarray:
    """``box`` of a verified record; of far files only the rows that it spans are read."""
    if not box.size:
        return record.array(opened.data)
    first, rows = box.offset[0] - record.piece.offset[0], box.size[0]
    row_nbytes = record.nbytes // record.piece.size[0]
    start = record.start + first * row_nbytes
    data = opened.data[start : start + rows * row_nbytes]
    block = Piece(record.piece.name, (box.offset[0], *record.piece.offset[1:]), (rows, *record.piece.size[1:]))
    return np.ascontiguousarray(data.view(record.dtype).reshape(block.size)[slices(box, block)])


def _numbers(array: np.ndarray, dtype: str) -> np.ndarray | None:
    """Floats as float64, integers as they are; None for what numpy has no arithmetic for."""
    if dtype.startswith("float8"):
        return None
    if dtype == "bfloat16":
        array = array.astype(np.uint32) << 16
        dtype = "float32"
    values = array.view(dtype)
    if values.dtype == np.bool_:
        return values.view(np.uint8)
    if values.dtype.kind in "iu":
        return values
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
        return values.astype(np.float64)


def _close(x: np.ndarray, y: np.ndarray, rtol: float) -> np.ndarray:
    distance, size = _distance(x, y), _distance(y, np.zeros_like(y))
    with np.errstate(all="ignore"):  # beyond float64 is infinite, which what is finite is checked against below
        near = distance <= rtol * size.astype(np.float64)
    near &= np.isfinite(x) & np.isfinite(y)
    return near | (x == y) | ((x != x) & (y != y))


def _distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """|x - y|; of integers exactly, as uint64: theirs can be larger than int64, and float64 has 53 bits."""
    if x.dtype.kind == "f":
        with np.errstate(all="ignore"):
            return np.abs(x - y)
    low, high = np.minimum(x, y).astype(np.uint64), np.maximum(x, y).astype(np.uint64)
    return high - low  # modulo 2**64, which is right for negative ones too
