"""Which surviving snapshot to take, and which bytes of it go from where to where.

Pure logic. Everything is an interval join by tensor name and then by box, for any pair of layouts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from checkpointing.boxes import describe, overlap, uncovered, volume, without
from checkpointing.holding import Holding
from checkpointing.schema import Piece, Schema
from checkpointing.snapshot import Record

_NAMED_IN_SENTENCE = 3


class StateLost(ValueError):
    """No complete state is left. ``missing`` are the boxes that nobody holds (of the newest step there is)."""

    def __init__(self, sentence: str, missing: tuple[Piece, ...] = ()) -> None:
        super().__init__(sentence, missing)
        self.sentence, self.missing = sentence, missing

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True)
class Destination:
    """What a rank (that need not exist yet) will hold, and on which node."""

    node: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Part:
    """``box`` (canonical coordinates) comes from ``record`` of ``holding``; ``local``: readable without its keeper."""

    holding: Holding
    record: Record
    box: Piece
    local: bool


@dataclass(frozen=True)
class Fetch:
    """One destination piece and the disjoint parts that fill it exactly."""

    piece: Piece
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class TransferPlan:
    """Per rank, what to fetch. ``tier`` is "disk" when any byte comes from disk.

    bytes_moved        bytes read from another node or from disk
    bytes_lower_bound  bytes that a destination rank needs and no memory on its node has
    """

    fetches: Mapping[int, tuple[Fetch, ...]]
    bytes_moved: int
    bytes_lower_bound: int
    tier: Literal["memory", "disk"]


def missing_boxes(schema: Schema, boxes: Iterable[Piece]) -> tuple[Piece, ...]:
    """The parts of the schema's tensors that ``boxes`` leave out, by exact cover (a volume would not see overlaps)."""
    held = defaultdict(set)
    for box in boxes:
        held[box.name].add(box)
    return tuple(
        box
        for spec in schema.tensors
        if 0 not in spec.shape
        for box in uncovered(Piece(spec.name, (0,) * len(spec.shape), spec.shape), sorted(held[spec.name]))
    )


def newest_complete(schema: Schema, holdings: Iterable[Holding]) -> tuple[int, int]:
    """(generation, step) of the newest state that the holdings cover entirely; the later step counts as newer, then the
    later generation. Raises StateLost, whose sentence names what is missing of the newest step there is.
    """
    by_step = defaultdict(list)
    for holding in holdings:
        by_step[holding.snapshot.step, holding.snapshot.generation].append(holding)
    newest_missing: tuple[Piece, ...] | None = None
    for step, generation in sorted(by_step, reverse=True):
        missing = missing_boxes(schema, held_boxes(by_step[step, generation]))
        if not missing:
            return generation, step
        newest_missing = newest_missing or missing
    if newest_missing is None:
        raise StateLost("no snapshot of any step is left")
    raise StateLost(describe_missing(max(by_step)[0], newest_missing), newest_missing)


def plan_transfer(schema: Schema, holdings: Sequence[Holding], destinations: Mapping[int, Destination]) -> TransferPlan:
    """Choose a source for every element that ``destinations`` need, each fetched once, from holdings of one step.

    Order of preference: memory of the same node, memory elsewhere (the node that serves least so far), disk. The result
    depends on the arguments alone. Raises StateLost when an element is held by nobody.
    """
    steps = {(holding.snapshot.generation, holding.snapshot.step) for holding in holdings}
    assert len(steps) <= 1, f"holdings of more than one state: {steps}"
    ordered = sorted(holdings, key=lambda holding: [str(part) for part in holding.key])
    names = {spec.name for spec in schema.tensors}
    sources = _index(ordered, names)
    load: dict[str, int] = defaultdict(int)  # bytes each node serves to others
    fetches: dict[int, tuple[Fetch, ...]] = {}
    moved = bound = 0
    tier: Literal["memory", "disk"] = "memory"
    lost: list[Piece] = []
    for rank in sorted(destinations):
        node, found = destinations[rank].node, []
        for piece in destinations[rank].pieces:
            join = _Join(piece)
            near = sources[piece.name].overlapping(piece) if piece.name in sources else []
            for source in near:
                if node in source.memory:
                    join.take(*source.memory[node], local=True)
            needed = sum(map(volume, join.rest))
            for source in near:
                if source.memory and join.rest:
                    server = min(source.memory, key=lambda other: (load[other], other))
                    load[server] += join.take(*source.memory[server], local=False)
            from_disk = 0
            for source in near:
                if source.disk is not None:
                    from_disk += join.take(*source.disk, local=True)
            lost += join.rest
            found.append(Fetch(piece, tuple(join.parts)))
            moved += from_disk + sum(volume(p.box) * p.record.itemsize for p in join.parts if not p.local)
            bound += needed * near[0].itemsize if near else 0
            tier = "disk" if from_disk else tier
        fetches[rank] = tuple(found)
    if lost:
        raise StateLost(describe_missing(max((step for _, step in steps), default=None), lost), tuple(lost))
    return TransferPlan(fetches, moved, bound, tier)


def held_boxes(holdings: Iterable[Holding]) -> Iterator[Piece]:
    """All boxes that the holdings have, with repetitions."""
    return (record.piece for holding in holdings for record in holding.snapshot.records)


def describe_missing(step: int | None, missing: Sequence[Piece]) -> str:
    """One sentence that names the first few boxes."""
    named = ", ".join(describe(box) for box in missing[:_NAMED_IN_SENTENCE])
    more = f" and {len(missing) - _NAMED_IN_SENTENCE} more" if len(missing) > _NAMED_IN_SENTENCE else ""
    state = "the state" if step is None else f"the state of step {step}"
    return f"{state} is lost: nobody holds {named}{more}"


class _Join:
    """Fills one destination piece from sources, never taking an element twice."""

    def __init__(self, piece: Piece) -> None:
        self.rest = [piece]
        self.parts: list[Part] = []

    def take(self, holding: Holding, record: Record, local: bool) -> int:
        """Take what is still needed and ``record`` has; return the number of bytes."""
        rest, taken = [], 0
        for box in self.rest:
            common = overlap(box, record.piece)
            if common is not None:
                self.parts.append(Part(holding, record, common, local))
                taken += volume(common) * record.itemsize
            rest += without(box, record.piece)
        self.rest = rest
        return taken


class _Source:
    """All holders of one box: at most one per node (the first in order), and at most one on disk."""

    def __init__(self, piece: Piece, itemsize: int) -> None:
        self.piece, self.itemsize = piece, itemsize
        self.memory: dict[str, tuple[Holding, Record]] = {}
        self.disk: tuple[Holding, Record] | None = None

    def add(self, holding: Holding, record: Record) -> None:
        if holding.tier == "memory":
            self.memory.setdefault(holding.node, (holding, record))
        elif self.disk is None:
            self.disk = (holding, record)


class _Boxes:
    """The sources of one tensor, sorted along the dim with the most cuts, so that a join looks only at neighbours."""

    def __init__(self, sources: Sequence[_Source]) -> None:
        num_dims = len(sources[0].piece.size)
        self.dim = max(range(num_dims), key=lambda dim: len({s.piece.offset[dim] for s in sources}), default=None)
        if self.dim is None:  # a scalar
            self.sources = list(sources)
            return
        dim = self.dim
        self.sources = sorted(sources, key=lambda source: (source.piece.offset[dim], source.piece))
        self.starts = [source.piece.offset[dim] for source in self.sources]
        self.longest = max(source.piece.size[dim] for source in self.sources)

    def overlapping(self, piece: Piece) -> list[_Source]:
        """Sources that may share elements with ``piece``, in a fixed order."""
        if self.dim is None:
            return self.sources
        start = piece.offset[self.dim]
        first = bisect_right(self.starts, start - self.longest)
        last = bisect_left(self.starts, start + piece.size[self.dim])
        return self.sources[first:last]


def _index(holdings: Iterable[Holding], names: set[str]) -> dict[str, _Boxes]:
    by_name: dict[str, dict[Piece, _Source]] = defaultdict(dict)
    for holding in holdings:
        for record in holding.snapshot.records:
            if record.piece.name in names:
                boxes = by_name[record.piece.name]
                if record.piece not in boxes:
                    boxes[record.piece] = _Source(record.piece, record.itemsize)
                boxes[record.piece].add(holding, record)
    return {name: _Boxes(list(boxes.values())) for name, boxes in by_name.items()}
