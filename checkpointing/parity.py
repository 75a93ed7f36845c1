"""One keeper's share of an erasure code: parity that grows as the shards arrive, and ranges read back of any shard.

Records are what is coded; what lies between them in a slot counts as zeros everywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from checkpointing.arena import Arena
from checkpointing.erasure import accumulate, decode
from checkpointing.holding import HoldingKey, Parity, Recipe, Shard, name_of, verify_record
from checkpointing.redundancy import Code
from checkpointing.schema import Piece
from checkpointing.snapshot import Record, Snapshot, digest_of

Span = tuple[int, int]  # first byte and the one after the last

_BLOCK_NBYTES = 1 << 20  # parity has a digest for each


class Forming:
    """A parity slot while the shards of one step arrive. Until ``finish`` it counts as empty."""

    def __init__(self, arena: Arena, slot: int, code: Code, row: int, step: int) -> None:
        self.slot, self.step = slot, step
        self._code, self._row = code, row
        self._stack = ExitStack()
        self._buffer = self._stack.enter_context(arena.writing(slot))
        self._buffer[:] = 0
        self._shards: dict[int, Shard] = {}

    @property
    def is_complete(self) -> bool:
        return len(self._shards) == sum(rank is not None for rank in self._code.ranks)

    def add(self, number: int, shard: Shard, data: np.ndarray) -> None:
        """Add shard ``number``, whose bytes are ``data`` (uint8, 1-d), all of which has been verified."""
        assert number not in self._shards, f"shard {number} came twice"
        code, row = self._code, slice(self._row, self._row + 1)
        for record in shard.snapshot.records:
            accumulate(code.num_data, code.num_parity, number, record.data(data), [record.data(self._buffer)], row)
        self._shards[number] = shard

    def finish(self) -> tuple[Snapshot, Parity]:
        """What the slot holds from now on; its records are blocks of parity."""
        first = next(iter(self._shards.values())).snapshot
        records = []
        for start in range(0, self._code.nbytes, _BLOCK_NBYTES):
            nbytes = min(_BLOCK_NBYTES, self._code.nbytes - start)
            digest = digest_of(self._buffer[start : start + nbytes])
            records.append(Record(Piece("parity", (start,), (nbytes,)), "uint8", start, nbytes, digest))
        snapshot = Snapshot(first.generation, first.step, self._code.number, first.layout, tuple(records), first.meta)
        self._stack.close()
        return snapshot, Parity(self._code, self._row, tuple(sorted(self._shards.items())))


def read_spans(
    records: Sequence[Record], buffer: np.ndarray, shard: Span, spans: Sequence[Span], key: HoldingKey
) -> np.ndarray:
    """``spans`` of the shard at ``shard`` of ``buffer``, one after the other (uint8, 1-d); zeros after its end.

    ``records``: all that is in the buffer. Each is verified before any of it is used; raises DigestMismatch.
    """
    start, end_of_shard = shard
    mine = (record for record in records if start <= record.start < end_of_shard)
    in_order = sorted(mine, key=lambda record: record.start)
    ends = [record.start + record.nbytes for record in in_order]
    out = np.zeros(sum(stop - first for first, stop in spans), np.uint8)
    verified, base = set(), 0
    for first, stop in spans:
        low, high = start + first, start + stop
        index = bisect_left(ends, low + 1)
        while index < len(in_order) and in_order[index].start < high:
            record = in_order[index]
            if index not in verified:
                verify_record(record, buffer, name_of(key), key)
                verified.add(index)
            begin, end = max(low, record.start), min(high, record.start + record.nbytes)
            out[base + begin - low : base + end - low] = buffer[begin:end]
            index += 1
        base += high - low
    return out


def rebuild(recipe: Recipe, found: Sequence[np.ndarray]) -> np.ndarray:
    """Ranges of a lost shard from the same ranges of others: ``found`` has those of ``recipe.sources``, in order."""
    code = recipe.code
    available = {source.number: data for source, data in zip(recipe.sources, found, strict=True)}
    available |= {number: np.zeros(len(found[0]), np.uint8) for number in recipe.zeros}
    return decode(code.num_data, code.num_parity, available, [recipe.number])[0]
