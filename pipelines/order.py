"""The global order as a function: position -> item, without arrays, so that it costs nothing to resume or to share.

A Feistel network permutes the smallest power-of-four domain that holds ``num_items``; positions that land outside are
walked along their cycle until they land inside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
"""

from __future__ import annotations

from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

_NUM_ROUNDS = 6


def derive_key(*parts: str | int) -> int:
    """A 64-bit key from a purpose and numbers, e.g. ``derive_key("documents", seed, epoch)``."""
    return xxh3_64_intdigest(repr(parts).encode())


@dataclass(frozen=True)
class Permutation:
    """A keyed bijection of ``range(num_items)``: O(1) memory, at most four walks of six rounds on average."""

    num_items: int
    key: int

    def __post_init__(self) -> None:
        assert self.num_items >= 1, "a permutation of nothing"

    def __call__(self, position: int) -> int:
        """The item at ``position``; both are in ``range(num_items)``."""
        assert 0 <= position < self.num_items, f"position {position} of {self.num_items}"
        half_bits = max(1, ((self.num_items - 1).bit_length() + 1) // 2)
        item = self._scramble(position, half_bits)
        while item >= self.num_items:
            item = self._scramble(item, half_bits)
        return item

    def _scramble(self, value: int, half_bits: int) -> int:
        mask = (1 << half_bits) - 1
        left, right = value >> half_bits, value & mask
        for number in range(_NUM_ROUNDS):
            mixed = xxh3_64_intdigest((right << 8 | number).to_bytes(16, "little"), seed=self.key)
            left, right = right, left ^ (mixed & mask)
        return left << half_bits | right
