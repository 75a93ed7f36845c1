"""Which bytes of a surviving state go from where to where, for any pair of layouts. Pure logic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from checkpointing.boxes import overlap, volume, without
from checkpointing.cover import StateLost, describe_missing
from checkpointing.holding import TIERS, Holding, HoldingKey, Tier
from checkpointing.schema import Piece, Schema
from checkpointing.snapshot import Record
from checkpointing.sources import Box, Held, Owners, Source, TensorSources, index


@dataclass(frozen=True)
class Destination:
    """What a rank (that need not exist yet) will hold, and on which node.

    own  key of the holding that the rank's worker wrote itself; None for a new worker
    """

    node: str
    pieces: tuple[Piece, ...]
    own: HoldingKey | None = None


class Part(NamedTuple):
    """``box`` (canonical coordinates) comes from ``record`` of ``holding``; ``local``: readable without its keeper."""

    holding: Holding
    record: Record
    box: Piece
    local: bool


class Fetch(NamedTuple):
    """One destination piece and the disjoint parts that fill it exactly."""

    piece: Piece
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class TransferPlan:
    """Per rank, what to fetch. ``tier`` is the farthest that any byte comes from.

    bytes_moved        bytes read from another node or from files
    bytes_lower_bound  bytes that a destination rank needs and no memory on its node has
    """

    fetches: Mapping[int, tuple[Fetch, ...]]
    bytes_moved: int
    bytes_lower_bound: int
    tier: Tier


def plan_transfer(
    schema: Schema,
    holdings: Sequence[Holding],
    destinations: Mapping[int, Destination],
    domains: Mapping[str, str] | None = None,
) -> TransferPlan:
    """Choose a source for every element that ``destinations`` need, each fetched once, from holdings of one step.

    ``domains``: node -> failure domain. The result depends on the arguments alone. Raises StateLost when an element is
    held by nobody.
    """
    planner = Planner(schema, holdings, domains)
    fetches = {rank: planner.fetches(destinations[rank]) for rank in sorted(destinations)}
    return TransferPlan(fetches, planner.bytes_moved, planner.bytes_lower_bound, planner.tier)


class Planner:
    """Plans one destination after the other; what they have in common is worked out once.

    Order of preference: the worker's own memory, its node's, memory in its failure domain, memory elsewhere (each time
    the node that serves least so far), disk, object storage. Bytes and ``tier`` are totals of what was planned so far.
    """

    def __init__(self, schema: Schema, holdings: Sequence[Holding], domains: Mapping[str, str] | None = None) -> None:
        steps = {(holding.snapshot.generation, holding.snapshot.step) for holding in holdings}
        assert len(steps) <= 1, f"holdings of more than one state: {steps}"
        self._step = next((step for _, step in steps), None)
        self._domains = domains or {}
        self._load: dict[str, int] = defaultdict(int)  # bytes each node serves to others
        self._tensors = index(holdings, {spec.name for spec in schema.tensors})
        self._owners: dict[tuple[str, ...], Owners] = {}
        self._by_key = {holding.key: holding for holding in holdings}
        self.bytes_moved = self.bytes_lower_bound = 0
        self.tier: Tier = "memory"

    def fetches(self, destination: Destination) -> tuple[Fetch, ...]:
        """What fills the destination's pieces. Raises StateLost, which names all of them that cannot be filled."""
        target = _Target(destination.node, self._domains.get(destination.node), self._own(destination))
        found, lost = [], []
        for piece in destination.pieces:
            tensor = self._tensors.get(piece.name)
            if tensor is None:
                if volume(piece):
                    lost.append(piece)
                continue
            commons, exact = tensor.grid.join(piece.offset, piece.size)
            if exact:
                parts = [
                    self._part(target, tensor, source, Piece(piece.name, offset, size), count)
                    for source, offset, size, count in commons
                ]
            else:
                parts, rest = self._overlapping(target, tensor, piece, [common.source for common in commons])
                lost += rest
            found.append(Fetch(piece, tuple(parts)))
        if lost:
            raise StateLost(describe_missing(self._step, lost), tuple(lost))
        return tuple(found)

    def _own(self, destination: Destination) -> Mapping[Piece, Held]:
        holding = None if destination.own is None else self._by_key.get(destination.own)
        return {} if holding is None else {record.piece: (holding, record) for record in holding.snapshot.records}

    def _part(self, target: _Target, tensor: TensorSources, box: Box, wanted: Piece, count: int) -> Part:
        """``wanted`` from the best holder of ``box``."""
        source = tensor.source(box)
        held = target.near(wanted.name, box, source)
        if held is not None:
            return Part(*held, wanted, True)
        nbytes = count * tensor.itemsize
        self.bytes_moved += nbytes
        self.bytes_lower_bound += nbytes
        if source.memory:
            server = self._owners_of(source).least_loaded(target.domain)
            self._load[server] += nbytes
            return Part(*source.memory[server], wanted, False)
        assert source.file is not None
        self.tier = max(self.tier, source.file[0].tier, key=TIERS.index)
        return Part(*source.file, wanted, True)

    def _overlapping(
        self, target: _Target, tensor: TensorSources, piece: Piece, boxes: Sequence[Box]
    ) -> tuple[list[Part], list[Piece]]:
        """Parts, and what nobody has, where boxes of holders overlap: nearest holders first, never an element twice."""
        sources = [(box, tensor.source(box)) for box in boxes]

        def distance(entry: tuple[Box, Source]) -> int:
            box, source = entry
            if target.near(piece.name, box, source) is not None:
                return 0
            if source.memory:
                return 1 if self._owners_of(source).are_in(target.domain) else 2
            return 3 if source.file is not None else 4

        parts: list[Part] = []
        rest = [piece]
        for box, _ in sorted(sources, key=distance):
            held = Piece(piece.name, *box)
            for common in filter(None, [overlap(needed, held) for needed in rest]):
                parts.append(self._part(target, tensor, box, common, volume(common)))
            rest = [left for needed in rest for left in without(needed, held)]
        return parts, rest

    def _owners_of(self, source: Source) -> Owners:
        nodes = tuple(source.memory)
        if nodes not in self._owners:
            self._owners[nodes] = Owners(nodes, self._domains, self._load)
        return self._owners[nodes]


class _Target(NamedTuple):
    """A destination while it is planned. ``own``: what its worker's own arena has."""

    node: str
    domain: str | None
    own: Mapping[Piece, Held]

    def near(self, name: str, box: Box, source: Source) -> Held | None:
        """The holder that the destination can read by itself."""
        held = self.own.get(Piece(name, *box)) if self.own else None
        held = held or source.memory.get(self.node)
        return held if held is None or held[0].role != "decoded" else None  # only its keeper can work it out
