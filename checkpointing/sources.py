"""Who holds which box, arranged so that planning for thousands of ranks is a small number of joins.

The tensors of a layer are cut like those of the next one, so their holders' boxes form one grid, joined once with each
box that anybody needs. The nodes that hold a box are those that hold thousands of others, so they share one queue.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from heapq import heapify, heapreplace
from typing import NamedTuple

from checkpointing.boxes import cells, overlap, volume
from checkpointing.holding import TIERS, Holding
from checkpointing.schema import Piece
from checkpointing.snapshot import Record

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size: a piece without a name
Held = tuple[Holding, Record]

_ROLES = ("primary", "pin", "copy", "decoded")


class Common(NamedTuple):
    """What a needed box shares with the box ``source``."""

    source: Box
    offset: tuple[int, ...]
    size: tuple[int, ...]
    num_elements: int


class Grid:
    """The boxes into which holders cut a tensor. ``join`` looks only at neighbours along the dim with the most cuts."""

    def __init__(self, boxes: Iterable[Box]) -> None:
        found = list(boxes)
        self._joins: dict[Box, tuple[tuple[Common, ...], bool]] = {}
        self._dim = max(range(len(found[0][0])), key=lambda dim: len({box[0][dim] for box in found}), default=None)
        dim = self._dim
        self._boxes = sorted(found, key=lambda box: () if dim is None else (box[0][dim], box))
        if dim is not None:
            self._starts = [offset[dim] for offset, _ in self._boxes]
            self._longest = max(size[dim] for _, size in self._boxes)

    def join(self, offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[tuple[Common, ...], bool]:
        """What the grid's boxes have of a box, and whether that fills it exactly, each element once."""
        joined = self._joins.get((offset, size))
        if joined is None:
            joined = self._joins[offset, size] = self._join(Piece("", offset, size))
        return joined

    def _join(self, needed: Piece) -> tuple[tuple[Common, ...], bool]:
        near = self._boxes
        if self._dim is not None:
            start = needed.offset[self._dim]
            first = bisect_right(self._starts, start - self._longest)
            near = near[first : bisect_left(self._starts, start + needed.size[self._dim])]
        shared = [(box, overlap(needed, Piece("", *box))) for box in near]
        commons = tuple(Common(box, it.offset, it.size, volume(it)) for box, it in shared if it is not None)
        full = sum(common.num_elements for common in commons) == math.prod(needed.size)
        boxes = (Piece("", common.offset, common.size) for common in commons)
        return commons, full and all(len(holders) == 1 for _, holders in cells(needed, boxes))


class Owners:
    """Nodes whose memory has the same boxes; the least loaded serves. ``load``: bytes that each node serves in all."""

    def __init__(self, nodes: Iterable[str], domains: Mapping[str, str], load: dict[str, int]) -> None:
        self._load = load
        self._queues: dict[str | None, list[tuple[int, str]]] = defaultdict(list)
        for node in nodes:
            for domain in {None, domains.get(node)}:
                self._queues[domain].append((load[node], node))
        for queue in self._queues.values():
            heapify(queue)

    def are_in(self, domain: str | None) -> bool:
        return domain in self._queues

    def least_loaded(self, domain: str | None) -> str:
        """Of the owners in ``domain``, or of all when none is there; ties by name."""
        queue = self._queues[domain if domain in self._queues else None]
        while True:
            known, node = queue[0]
            if known == self._load[node]:  # loads only grow, so nobody behind it can be lower
                return node
            heapreplace(queue, (self._load[node], node))


class Source:
    """The holders of one box: the first of each node's, and the nearest file. Either may be missing."""

    def __init__(self, held: Iterable[Held]) -> None:
        self.memory: dict[str, Held] = {}
        self.file: Held | None = None
        for holding, record in held:
            if holding.tier == "memory":
                self.memory.setdefault(holding.node, (holding, record))
            elif self.file is None:
                self.file = (holding, record)


class TensorSources:
    """The holders of one tensor."""

    def __init__(self, held: dict[Box, list[Held]], grid: Grid) -> None:
        self.grid = grid
        record = next(iter(held.values()))[0][1]
        self.itemsize = record.itemsize
        self._held = held
        self._sources: dict[Box, Source] = {}

    def source(self, box: Box) -> Source:
        source = self._sources.get(box)
        if source is None:
            source = self._sources[box] = Source(self._held[box])
        return source


def index(holdings: Iterable[Holding], names: set[str]) -> dict[str, TensorSources]:
    """The holders of the tensors ``names``; the result does not depend on the order of ``holdings``."""
    by_name: dict[str, dict[Box, list[Held]]] = {}
    for holding in sorted(holdings, key=_order):
        for record in holding.snapshot.records:
            name, offset, size = record.piece
            if name in names:
                by_name.setdefault(name, {}).setdefault((offset, size), []).append((holding, record))
    grids: dict[frozenset[Box], Grid] = {}
    found = {}
    for name, held in by_name.items():
        boxes = frozenset(held)
        if boxes not in grids:
            grids[boxes] = Grid(boxes)
        found[name] = TensorSources(held, grids[boxes])
    return found


def _order(holding: Holding) -> tuple[int, str, int, int, int, str]:
    """Near tiers first, then by node, and a worker's own state before copies of another's."""
    file = "" if holding.tier == "memory" else str(holding.locator)
    role = _ROLES.index(holding.role)
    return TIERS.index(holding.tier), holding.node, role, holding.snapshot.rank, holding.slot, file
