"""A layout: the sizes of the parallel axes inside one worker group, and which rank sits where.

A layout is pure data. The driver can reason about ranks that do not exist yet, and every worker derives its own
coordinates from its rank alone. Ranks are numbered with ``pp`` outermost and ``tp`` innermost, so that tensor-parallel
peers (the chattiest) are neighbours and land on one node.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Outermost axis first: rank = ((pp * R + r) * D + dp) * T + tp.
AXES = ("pp", "r", "dp", "tp")
_LATER_AXES = ("cp", "ep")
_TOKEN = re.compile(r"([a-z]+)(\d+)")


@dataclass(frozen=True, order=True)
class Coordinates:
    """Where one rank sits: its index along each axis."""

    pp: int
    r: int
    dp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """Axis sizes of one worker group.

    ``pp`` pipeline stages, ``r`` data-parallel replicas that hold equal shards (HSDP's outer axis), ``dp``
    data-parallel shards (FSDP), ``tp`` tensor-parallel ranks. Layers are split over stages as evenly as they go,
    earlier stages first.
    """

    pp: int = 1
    r: int = 1
    dp: int = 1
    tp: int = 1

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``pp2·dp3·tp2`` (or ``pp2.dp3.tp2``; axes in any order, size-1 axes left out; ``1`` is one worker).

        Raises ValueError with one sentence when the text is not a layout.
        """
        sizes: dict[str, int] = {}
        if text.strip() == "1":
            return cls()
        for token in re.split(r"[·.]", text.strip()):
            match = _TOKEN.fullmatch(token.strip())
            if match is None:
                raise ValueError(f"layout {text!r}: {token!r} is not an axis with a size (example: pp2·dp3·tp2)")
            axis, size = match[1], int(match[2])
            if axis in _LATER_AXES:
                raise ValueError(f"layout {text!r}: axis {axis!r} is not supported yet; use pp, r, dp and tp")
            if axis not in AXES:
                raise ValueError(f"layout {text!r}: unknown axis {axis!r}; the axes are pp, r, dp and tp")
            if axis in sizes:
                raise ValueError(f"layout {text!r}: axis {axis!r} is given twice")
            if size < 1:
                raise ValueError(f"layout {text!r}: the size of axis {axis!r} must be at least 1")
            sizes[axis] = size
        return cls(**sizes)

    def __str__(self) -> str:
        return "·".join(f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1) or "1"

    @property
    def size(self) -> int:
        """Number of workers the layout needs."""
        return self.pp * self.r * self.dp * self.tp

    @property
    def data_size(self) -> int:
        """Number of data ranks: groups of workers that read different rows."""
        return self.r * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.size, f"rank {rank} outside layout {self}"
        rank, tp = divmod(rank, self.tp)
        rank, dp = divmod(rank, self.dp)
        pp, r = divmod(rank, self.r)
        return Coordinates(pp, r, dp, tp)

    def rank(self, at: Coordinates) -> int:
        return ((at.pp * self.r + at.r) * self.dp + at.dp) * self.tp + at.tp

    def data_rank(self, at: Coordinates) -> int:
        """Index of this worker's data rank, 0 <= index < data_size."""
        return at.r * self.dp + at.dp

    def stage_layers(self, stage: int, num_layers: int) -> range:
        """Layer indices held by pipeline stage ``stage`` when ``num_layers`` are dealt as evenly as they go."""
        base, extra = divmod(num_layers, self.pp)
        start = stage * base + min(stage, extra)
        return range(start, start + base + (stage < extra))
