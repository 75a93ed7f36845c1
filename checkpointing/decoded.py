"""What codes can give back of what nobody has any more. Pure logic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from checkpointing.holding import Holding, Parity, Recipe, Source
from checkpointing.redundancy import Guard
from checkpointing.schema import Piece


def with_decoded(holdings: Iterable[Holding]) -> list[Holding]:
    """The holdings that have state, and what can be decoded of the rest: pieces that no holding of their state has.

    Each keeper that has parity offers them, with the shards to read in the recipe: data first. Parity itself is left
    out. Whoever finds a damaged holding calls this again without it.
    """
    found: list[Holding] = []
    for of in _states(holdings):
        having = [holding for holding in of if holding.role != "parity"]
        held = {record.piece for holding in having for record in holding.snapshot.records}
        found += having
        for code in _codes(of):
            if code.num_left < code.num_needed:
                continue
            for number, shard in code.parity.shards:
                records = tuple(record for record in shard.snapshot.records if record.piece not in held)
                if number in code.data or not records:
                    continue
                recipe = Recipe(code.parity.code, number, code.sources, code.zeros)
                for row in code.rows:
                    snapshot = replace(shard.snapshot, records=records)
                    number_ = code.parity.code.number
                    found.append(Holding(snapshot, row.slot, row.node, "decoded", "memory", recipe, number_))
    return found


def guards(holdings: Sequence[Holding]) -> dict[Piece, Guard]:
    """Where each piece of one state is, as far as it is anywhere."""
    whole: dict[Piece, dict[str, None]] = defaultdict(dict)
    copies: dict[Piece, dict[str, None]] = defaultdict(dict)
    for holding in holdings:
        if holding.role != "parity":
            for record in holding.snapshot.records:
                (copies if holding.role == "copy" else whole)[record.piece][holding.node] = None
    found = {piece: Guard(tuple(whole[piece]), tuple(copies[piece])) for piece in dict.fromkeys([*whole, *copies])}
    for code in _codes(holdings):
        shards = tuple(source.node for source in (*code.data.values(), *code.row_sources))
        for _, shard in code.parity.shards:
            for record in shard.snapshot.records:
                guard = found.get(record.piece, Guard(()))
                found[record.piece] = replace(guard, shards=shards, needed=code.num_needed)
    return found


@dataclass(frozen=True)
class _Code:
    """What is left of one code. ``data``: shard number -> where; ``rows``: the parity, by row."""

    parity: Parity
    data: Mapping[int, Source]
    rows: Sequence[Holding]

    @property
    def zeros(self) -> tuple[int, ...]:
        return tuple(number for number, rank in enumerate(self.parity.code.ranks) if rank is None)

    @property
    def num_needed(self) -> int:
        return self.parity.code.num_data - len(self.zeros)

    @property
    def num_left(self) -> int:
        return len(self.data) + len(self.rows)

    @property
    def row_sources(self) -> list[Source]:
        code = self.parity.code
        return [Source(code.num_data + row.part, row.node, row.key, 0, code.nbytes) for row in self.rows]

    @property
    def sources(self) -> tuple[Source, ...]:
        """As many as a decode needs."""
        return tuple([*self.data.values(), *self.row_sources][: self.num_needed])


def _codes(holdings: Sequence[Holding]) -> list[_Code]:
    """The codes of one state, of which there is any parity."""
    rows: dict[int, list[Holding]] = defaultdict(list)
    primaries: dict[int, Holding] = {}
    for holding in sorted(holdings, key=lambda holding: holding.key):
        if holding.role == "parity":
            rows[holding.snapshot.rank].append(holding)
        elif holding.role == "primary" and holding.tier == "memory":
            primaries[holding.snapshot.rank] = holding
    found = []
    for number in sorted(rows):
        parity = rows[number][0].parity
        assert parity is not None
        data = {}
        for index, shard in parity.shards:
            primary = primaries.get(shard.snapshot.rank)
            if primary is not None:
                data[index] = Source(index, primary.node, primary.key, shard.start, shard.start + shard.snapshot.nbytes)
        found.append(_Code(parity, data, rows[number]))
    return found


def _states(holdings: Iterable[Holding]) -> list[list[Holding]]:
    by_state: dict[tuple[int, int], list[Holding]] = defaultdict(list)
    for holding in holdings:
        by_state[holding.snapshot.generation, holding.snapshot.step].append(holding)
    return list(by_state.values())
