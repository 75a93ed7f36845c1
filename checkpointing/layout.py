"""A layout: the sizes of the parallel axes inside one worker group, and which rank sits where.

A layout is pure data. The driver can reason about ranks that do not exist yet, and every worker derives its own
coordinates from its rank alone. The same ranks of a pipeline stage are mapped twice (arXiv:2504.14960):

    dense tensors    pp x r x dp x cp x tp     FSDP shards over dp x cp together, as torchtitan does
    expert tensors   pp x r x edp x ep x etp   edp = dp * cp * tp / (ep * etp), and FSDP shards over edp

so ``ep`` and ``etp`` fold ranks that are there already and add none. The outermost axis comes first and ``tp`` (or
``etp``) is innermost, so that tensor-parallel peers (the chattiest) are neighbours and land on one node.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

AXES = ("pp", "r", "dp", "cp", "tp")  # of the dense mesh: rank = (((pp * R + r) * D + dp) * C + cp) * T + tp
_TOKENS = ("pp", "v", "r", "dp", "cp", "tp", "ep", "etp")
_TOKEN = re.compile(r"([a-z]+)([0-9]+)(?::([0-9]+(?:\+[0-9]+)*))?")
_MOST_DIGITS = 9  # of a number; what is longer is a slip of the hand


@dataclass(frozen=True, order=True)
class Coordinates:
    """Where one rank sits: its index along each axis of the dense mesh, then along those of the expert mesh."""

    pp: int
    r: int
    dp: int
    cp: int
    tp: int
    edp: int
    ep: int
    etp: int


@dataclass(frozen=True)
class Layout:
    """Axis sizes of one worker group.

    pp      pipeline stages
    r       data-parallel replicas that hold equal shards (HSDP's outer axis)
    dp      data-parallel shards (FSDP)
    cp      context-parallel ranks: parts of one sequence; parameters are sharded over them as over dp
    tp      tensor-parallel ranks
    ep      expert-parallel ranks, among the dp * cp * tp ranks of a stage
    etp     tensor-parallel ranks of each expert; 1 also where tp > 1, so that experts are whole unless it is given
    v       virtual stages of each pipeline rank (interleaving): virtual stage s is on rank s % pp
    layers  number of layers of each virtual stage; None deals them as evenly as they go, earlier stages first

    Raises ValueError with one sentence when the sizes do not go together.
    """

    pp: int = 1
    r: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    v: int = 1
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for axis in _TOKENS:
            if getattr(self, axis) < 1:
                raise ValueError(f"layout {str(self)!r}: the size of axis {axis!r} must be at least 1")
        if self.dp * self.cp * self.tp % (self.ep * self.etp):
            raise ValueError(
                f"layout {str(self)!r}: ep*etp={self.ep * self.etp} does not divide the dp*cp*tp="
                f"{self.dp * self.cp * self.tp} ranks of a stage that experts are dealt to"
            )
        if self.layers is not None and len(self.layers) != self.num_stages:
            raise ValueError(
                f"layout {str(self)!r}: gives the layers of {len(self.layers)} stages, but pp*v is {self.num_stages}"
            )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``pp2·dp3·tp2`` (or ``pp2.dp3.tp2``; axes in any order, size-1 axes left out; ``1`` is one worker).

        ``pp2:5+3`` gives the layers of each stage; ``pp2:2+2+3+1·v2`` those of each of the 2 * 2 virtual stages.
        Raises ValueError with one sentence when the text is not a layout.
        """
        sizes: dict[str, int] = {}
        layers = None
        too_long = re.search(rf"[0-9]{{{_MOST_DIGITS + 1},}}", text)
        if too_long is not None:
            raise ValueError(f"layout {too_long[0][:_MOST_DIGITS]}…: a size of {len(too_long[0])} digits is too large")
        if text.strip() == "1":
            return cls()
        for token in re.split(r"[·.]", text.strip()):
            match = _TOKEN.fullmatch(token.strip())
            if match is None:
                raise ValueError(f"layout {text!r}: {token!r} is not an axis with a size (example: pp2·dp3·tp2)")
            axis, size = match[1], int(match[2])
            if axis not in _TOKENS:
                known = f"{', '.join(_TOKENS[:-1])} and {_TOKENS[-1]}"
                raise ValueError(f"layout {text!r}: unknown axis {axis!r}; the axes are {known}")
            if axis in sizes:
                raise ValueError(f"layout {text!r}: axis {axis!r} is given twice")
            if size < 1:
                raise ValueError(f"layout {text!r}: the size of axis {axis!r} must be at least 1")
            if match[3] is not None:
                if axis != "pp":
                    raise ValueError(f"layout {text!r}: {token!r} gives layers per stage, which only pp takes")
                layers = tuple(map(int, match[3].split("+")))
            sizes[axis] = size
        return cls(**sizes, layers=layers)

    def __str__(self) -> str:
        tokens = {axis: f"{axis}{getattr(self, axis)}" for axis in _TOKENS}
        if self.layers is not None:
            tokens["pp"] += f":{'+'.join(map(str, self.layers))}"
        return "·".join(token for axis, token in tokens.items() if token != f"{axis}1") or "1"

    @property
    def size(self) -> int:
        """Number of workers the layout needs."""
        return self.pp * self.r * self.stage_size

    @property
    def stage_size(self) -> int:
        """Number of ranks among which one replica of a stage is divided."""
        return self.dp * self.cp * self.tp

    @property
    def data_size(self) -> int:
        """Number of data ranks: groups of workers that read different rows."""
        return self.r * self.dp

    @property
    def edp(self) -> int:
        """Number of ranks that hold shards of the same experts."""
        return self.stage_size // (self.ep * self.etp)

    @property
    def num_stages(self) -> int:
        """Number of virtual stages."""
        return self.pp * self.v

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.size, f"rank {rank} outside layout {self}"
        stage, inner = divmod(rank, self.stage_size)
        pp, r = divmod(stage, self.r)
        outer, tp = divmod(inner, self.tp)
        dp, cp = divmod(outer, self.cp)
        outer, etp = divmod(inner, self.etp)
        edp, ep = divmod(outer, self.ep)
        return Coordinates(pp, r, dp, cp, tp, edp, ep, etp)

    def rank(self, at: Coordinates) -> int:
        return (((at.pp * self.r + at.r) * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp

    def data_rank(self, at: Coordinates) -> int:
        """Index of this worker's data rank, 0 <= index < data_size."""
        return at.r * self.dp + at.dp

    def stages_of(self, pp: int) -> range:
        """The virtual stages of pipeline rank ``pp``."""
        return range(pp, self.num_stages, self.pp)

    def stage_layers(self, stage: int, num_layers: int) -> range:
        """Layer indices held by virtual stage ``stage`` (with v = 1 simply the stage) of a model of ``num_layers``."""
        if self.layers is not None:
            assert sum(self.layers) == num_layers, f"layout {self} for a model of {num_layers} layers"
            start = sum(self.layers[:stage])
            return range(start, start + self.layers[stage])
        base, extra = divmod(num_layers, self.num_stages)
        start = stage * base + min(stage, extra)
        return range(start, start + base + (stage < extra))
