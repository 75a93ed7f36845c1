"""Linear maps over GF(2^8) on byte buffers: what erasure codes are made of.

A byte is a polynomial over GF(2) modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11d, as RAID-6 and ISA-L have it). Two back ends
give the same bytes: Intel's ISA-L, which the `pyeclib` wheel carries, and numpy, which needs nothing.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

# (matrix, sources, targets, add): targets = matrix @ sources, or += with ``add``. ``matrix`` is uint8, a row per target
# and a column per source; the buffers are uint8, 1-d, contiguous, of one length, and no target overlaps another.
Multiply = Callable[[np.ndarray, Sequence[np.ndarray], Sequence[np.ndarray], bool], None]

_POLYNOMIAL = 0x1D
_NUMPY_BLOCK = 1 << 17  # bytes per buffer: a block of every source stays in the cache until all targets have it
_ISAL_BLOCK = 1 << 30  # its lengths are ints


@cache
def products() -> np.ndarray:
    """uint8[256, 256]: ``products()[a, b]`` is a times b."""
    powers, value = [], 1
    for _ in range(255):
        powers.append(value)
        value = value << 1 ^ (0x100 | _POLYNOMIAL if value & 0x80 else 0)
    exp, log = np.array(powers, np.uint8), np.zeros(256, np.int64)
    log[exp] = np.arange(255)
    table = exp[(log[:, None] + log[None, :]) % 255]
    table[0, :] = table[:, 0] = 0
    return table


def inverse_of(values: np.ndarray) -> np.ndarray:
    """1 / value for each of ``values`` (uint8, none zero)."""
    return np.argmax(products()[values] == 1, axis=-1).astype(np.uint8)


def inverse(matrix: np.ndarray) -> np.ndarray:
    """The inverse of a square uint8 matrix, which must have one."""
    size, table = len(matrix), products()
    rows = np.concatenate([matrix, np.eye(size, dtype=np.uint8)], axis=1)
    for column in range(size):
        pivot = column + int(np.flatnonzero(rows[column:, column])[0])
        rows[[column, pivot]] = rows[[pivot, column]]
        rows[column] = table[inverse_of(rows[column, column]), rows[column]]
        factors = rows[:, column].copy()
        factors[column] = 0
        rows ^= table[factors[:, None], rows[column]]
    return rows[:, size:]


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Matrix product of two uint8 matrices."""
    return np.bitwise_xor.reduce(products()[left[:, :, None], right[None]], axis=1)


@cache
def isal() -> Multiply | None:
    """ISA-L's back end, or None where the library is not there. It releases the GIL."""
    found = importlib.util.find_spec("pyeclib")
    folder = Path(found.origin).parent.parent / "pyeclib.libs" if found and found.origin else Path()
    try:
        library = ctypes.CDLL(str(next(folder.glob("libisal-*.so*"))))
        library.ec_encode_data, library.ec_encode_data_update, library.ec_init_tables  # noqa: B018
    except (StopIteration, OSError, AttributeError):  # a private part of another package, which may move
        return None

    def multiply(matrix: np.ndarray, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], add: bool) -> None:
        num_rows, num_columns = matrix.shape
        tables = ctypes.create_string_buffer(32 * matrix.size)
        library.ec_init_tables(num_columns, num_rows, np.ascontiguousarray(matrix).tobytes(), tables)
        for start in range(0, len(targets[0]), _ISAL_BLOCK):
            length = min(_ISAL_BLOCK, len(targets[0]) - start)
            to = _addresses(targets, start)
            if not add:
                library.ec_encode_data(length, num_columns, num_rows, tables, _addresses(sources, start), to)
                continue
            for column, source in enumerate(sources):
                at = ctypes.c_void_p(source.ctypes.data + start)
                library.ec_encode_data_update(length, num_columns, num_rows, column, tables, at, to)

    return multiply


def _addresses(buffers: Sequence[np.ndarray], start: int) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(buffers))(*(buffer.ctypes.data + start for buffer in buffers))


def numpy_multiply(matrix: np.ndarray, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], add: bool) -> None:
    """The back end in numpy: fast where the coefficients are small, since each costs a doubling per binary digit."""
    length = len(targets[0])
    words = length - length % 8
    scratch = np.empty((2, min(_NUMPY_BLOCK, length)), np.uint8)
    for start in (*range(0, words, _NUMPY_BLOCK), *([words] if words < length else [])):
        stop = min(start + _NUMPY_BLOCK, words) if start < words else length
        dtype = np.uint64 if start < words else np.uint8
        total, carry = scratch[:, : stop - start]
        block = [source[start:stop].view(dtype) for source in sources]
        for coefficients, target in zip(matrix.tolist(), targets, strict=True):
            into = target[start:stop]
            if not add:
                into[:] = 0
            if max(coefficients) == 1:
                _combine(coefficients, block, into, carry, dtype)
            else:
                total[:] = 0
                _combine(coefficients, block, total, carry, dtype)
                np.bitwise_xor(into.view(dtype), total.view(dtype), out=into.view(dtype))


def _combine(
    coefficients: Sequence[int], block: Sequence[np.ndarray], total: np.ndarray, carry: np.ndarray, dtype: type
) -> None:
    """total += sum of coefficient times source, by Horner's scheme over the binary digits of the coefficients.

    This takes as many doublings as the largest coefficient has digits after the first, whatever the number of sources;
    if any, ``total`` must be zero.
    """
    wide: np.ndarray = total.view(dtype)
    wide_carry: np.ndarray = carry.view(dtype)
    top = max(coefficients).bit_length() - 1
    for digit in range(top, -1, -1):
        if digit < top:  # double: shift every byte left, and reduce those that lost a digit
            np.right_shift(total.view(np.int8), 7, out=carry.view(np.int8))
            np.bitwise_and(carry, _POLYNOMIAL, out=carry)
            np.add(total, total, out=total)
            np.bitwise_xor(wide, wide_carry, out=wide)
        for coefficient, source in zip(coefficients, block, strict=True):
            if coefficient >> digit & 1:
                np.bitwise_xor(wide, source, out=wide)
