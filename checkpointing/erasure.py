"""Reed-Solomon codes: k shards of data and m of parity, of which any k give back all.

Parity 0 is the XOR of the data, whatever m is. With m = 2 the second has the coefficients 1, 2, ... k: as good as
RAID-6's powers of two, and cheap without a library, since they are small. From m = 3 on the rows are those of a Cauchy
matrix, scaled so that its first is all ones; every square part of it has an inverse, which is what a code needs.

The codes are linear, so parity can be accumulated: shards may come one by one, in any order. Shards are uint8, 1-d,
contiguous, of equal length (any, unaligned too); number 0 to k-1 is data, k to k+m-1 parity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from checkpointing.galois import Multiply, inverse, inverse_of, isal, numpy_multiply, product, products

_MAX_SHARDS = 255
_MAX_PARITY_OF_NUMPY = 2  # more would be slower than copies


def check_code(k: int, m: int) -> None:
    """Raise ValueError, in a sentence, when there is no code with ``k`` shards of data and ``m`` of parity here."""
    if k < 1 or m < 1 or k + m > _MAX_SHARDS:
        raise ValueError(
            f"there is no erasure code with {k} shards of data and {m} of parity: "
            f"both must be at least 1, and {_MAX_SHARDS} at most together"
        )
    if m > _MAX_PARITY_OF_NUMPY and isal() is None:
        raise ValueError(
            f"parity against {m} losses needs ISA-L, which comes with the package pyeclib and was not found: "
            f"install it, or protect against {_MAX_PARITY_OF_NUMPY} at most"
        )


def encode(data: Sequence[np.ndarray], parity: Sequence[np.ndarray]) -> None:
    """Fill the ``parity`` shards of all ``data`` shards. Raises as ``check_code``."""
    _multiply(len(data), len(parity))(_parity_matrix(len(data), len(parity)), data, parity, False)


def accumulate(
    k: int, m: int, index: int, data: np.ndarray, parity: Sequence[np.ndarray], rows: slice = slice(None)
) -> None:
    """Add data shard ``index`` of ``k`` to parity shards, in place; they start as zeros.

    ``rows``: which of the code's ``m`` they are. Adding it once more takes it out again. Raises as ``check_code``.
    """
    _multiply(k, m)(_parity_matrix(k, m)[rows, index : index + 1], [data], parity, True)


def decode(k: int, m: int, available: Mapping[int, np.ndarray], wanted: Sequence[int]) -> list[np.ndarray]:
    """The ``wanted`` shards, new arrays, from any ``k`` shards (equal ranges of shards give that range of the others).

    Data is used before parity, and the first parity before others. Raises as ``check_code``; ValueError when fewer than
    ``k`` are available.
    """
    if len(available) < k:
        raise ValueError(f"{len(available)} shards are left of a code that needs {k} to give back the others")
    used = tuple(sorted(available)[:k])
    shards = [available[number] for number in used]
    rebuilt = [np.empty(len(shards[0]), np.uint8) for _ in wanted]
    if wanted:
        _multiply(k, m)(_decoding_matrix(k, m, used, tuple(wanted)), shards, rebuilt, False)
    return rebuilt


def _multiply(k: int, m: int) -> Multiply:
    check_code(k, m)
    return isal() or numpy_multiply


@cache
def _parity_matrix(k: int, m: int) -> np.ndarray:
    """uint8[m, k]: parity = matrix @ data."""
    if m <= 2:
        return np.stack([np.ones(k, np.uint8), np.arange(1, k + 1, dtype=np.uint8)])[:m]
    differences = np.arange(k, k + m)[:, None] ^ np.arange(k)[None, :]
    return products()[inverse_of(differences), differences[0]]


@cache
def _decoding_matrix(k: int, m: int, used: tuple[int, ...], wanted: tuple[int, ...]) -> np.ndarray:
    """uint8[len(wanted), k]: wanted = matrix @ used."""
    generator = np.concatenate([np.eye(k, dtype=np.uint8), _parity_matrix(k, m)])
    return product(generator[list(wanted)], inverse(generator[list(used)]))
