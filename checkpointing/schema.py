"""The canonical space: one unpadded, unfused tensor per name, and which boxes of it a rank holds.

Everything here is pure: from a schema, a layout and a rank follow the boxes, whether the rank exists or not.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from checkpointing.cuts import chunk, head_chunk, join, padded_chunk
from checkpointing.layout import Coordinates, Layout


class Piece(NamedTuple):
    """A half-open box of one canonical tensor: ``offset[d] <= i_d < offset[d] + size[d]``.

    A tuple, because plans of large clusters make and hash millions of them.
    """

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True)
class TensorSpec:
    """One canonical tensor and how layouts cut it.

    name       "layers.3.attention.wq.weight" for a parameter, "exp_avg/layers.3.attention.wq.weight" for its state
    shape      canonical shape; () for a scalar
    dtype      numpy name ("float32", "int64"; "bfloat16" is stored as its own 2-byte name)
    tp_dim     dim that tensor parallelism cuts; None: every tensor-parallel rank holds all of it
    where      "layer" | "first" stage | "last" stage | "ends" (both: a tied embedding) | "all" stages
    layer      decoder layer index, for "layer"
    fsdp_dims  FSDP cuts the first of these dims that has a row for every rank, or else the last; (): none
    ep_dim     for the experts of a layer: the dim that counts them; such a tensor lives on the expert mesh
    heads      ``tp_dim`` consists of so many heads, which stay whole and are repeated over further ranks
    pad_to     local tensors are padded along ``tp_dim`` to one multiple of this; 0: not padded, torch.chunk's sizes
    parameter  for optimizer state: shape of the parameter, to which all dims above refer
    dims       for optimizer state: which dim of the parameter each of its dims follows (None: a dim of its own);
               its boxes are the parameter's, projected
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tp_dim: int | None
    where: Literal["layer", "first", "last", "ends", "all"]
    layer: int | None = None
    fsdp_dims: tuple[int, ...] = (0,)
    ep_dim: int | None = None
    heads: int | None = None
    pad_to: int = 0
    parameter: tuple[int, ...] | None = None
    dims: tuple[int | None, ...] | None = None

    @property
    def stored_as(self) -> str:
        """Name of the numpy dtype that carries the bits: numpy has no bfloat16 and no 8-bit floats."""
        return "uint16" if self.dtype == "bfloat16" else "uint8" if self.dtype.startswith("float8_") else self.dtype

    @property
    def cuts(self) -> Hashable:
        """Equal for tensors that every layout cuts alike."""
        return self.shape, self.tp_dim, self.fsdp_dims, self.ep_dim, self.heads, self.pad_to, self.parameter, self.dims


@dataclass(frozen=True)
class Fused:
    """A local tensor that joins several canonical tensors along ``dim``, after tensor parallelism and before FSDP.

    ``blocks``: rows of each in turn (see ``cuts.join``); None joins them one after the other.
    """

    name: str
    parts: tuple[str, ...]
    dim: int = 0
    blocks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Schema:
    """All tensors of a training state, in a fixed order. ``num_layers`` is what pipeline stages divide.

    aliases  (other name, canonical name) of tied weights, which are one tensor
    fused    how the model that runs joins canonical tensors
    """

    tensors: tuple[TensorSpec, ...]
    num_layers: int
    aliases: tuple[tuple[str, str], ...] = ()
    fused: tuple[Fused, ...] = ()

    def canonical(self, name: str) -> str:
        """The canonical name of a tensor or of an optimizer state ("<state>/<parameter>")."""
        state, slash, parameter = name.rpartition("/")
        return state + slash + dict(self.aliases).get(parameter, parameter)


class Place(NamedTuple):
    """``piece`` lies in a local tensor from index ``start`` on, one per dim; or in C order in a buffer of one dim."""

    piece: Piece
    start: tuple[int, ...]

    def view(self, local: Any) -> Any:
        """The piece as a view of ``local`` (a numpy array or a torch tensor), of shape ``piece.size``."""
        size = self.piece.size
        if len(self.start) != len(size):
            return local[self.start[0] : self.start[0] + math.prod(size)].reshape(size)
        return local[(..., *(slice(start, start + length) for start, length in zip(self.start, size, strict=True)))]


@dataclass(frozen=True)
class LocalTensor:
    """A tensor as a rank has it. What no place covers is padding."""

    name: str
    size: tuple[int, ...]
    places: tuple[Place, ...]


class _Segment(NamedTuple):
    """A box of tensor ``part`` of a unit, and where it starts in the unit's local tensor."""

    part: int
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: tuple[int, ...]


_Cut = tuple[tuple[int, ...], tuple[_Segment, ...]]  # size of the local tensor, and what is in it


class _Unit(NamedTuple):
    """What becomes one local tensor. ``kind`` is equal for units that are cut alike."""

    name: str
    kind: int
    specs: tuple[TensorSpec, ...]
    fused: Fused | None


class ShardMap:
    """Who holds what under one layout. Ask one map about many ranks: what is cut alike is cut once.

    Raises ValueError for a fused tensor that the layout cannot cut.
    """

    def __init__(self, schema: Schema, layout: Layout) -> None:
        self.schema, self.layout = schema, layout
        self._cuts: dict[tuple[int, ...], _Cut] = {}
        fused = {name: one for one in schema.fused for name in one.parts}
        specs = {spec.name: spec for spec in schema.tensors}
        stage_of = {layer: s for s in range(layout.num_stages) for layer in layout.stage_layers(s, schema.num_layers)}
        kinds: dict[Hashable, int] = {}
        self._units: list[list[_Unit]] = [[] for _ in range(layout.pp)]
        for spec in schema.tensors:
            one = fused.get(spec.name)
            if one is not None and one.parts[0] != spec.name:
                continue  # comes with the first of its parts
            parts = (spec,) if one is None else tuple(specs[name] for name in one.parts)
            key = (tuple(part.cuts for part in parts), one and (one.dim, one.blocks))
            unit = _Unit(one.name if one else spec.name, kinds.setdefault(key, len(kinds)), parts, one)
            if one is not None and _cuts_copies_differently(unit, layout):
                raise ValueError(
                    f"layout {layout} repeats heads of {one.name} on ranks whose parts of it are not equally long, and "
                    "FSDP would cut the copies differently; take a tensor-parallel size that divides all its heads"
                )
            for pp in _stages(spec, layout, stage_of):
                self._units[pp].append(unit)

    def local(self, rank: int) -> tuple[LocalTensor, ...]:
        """The local tensors of ``rank``, in the schema's order, empty ones included."""
        return tuple(
            LocalTensor(
                unit.name, size, tuple(Place(Piece(unit.specs[s.part].name, s.offset, s.size), s.start) for s in found)
            )
            for unit, (size, found) in self._held(rank)
        )

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The boxes that ``rank`` holds, in the schema's order; empty ones are left out."""
        return tuple(
            Piece(unit.specs[part].name, offset, size)
            for unit, (_, found) in self._held(rank)
            for part, offset, size, _ in found
        )

    def _held(self, rank: int) -> Iterator[tuple[_Unit, _Cut]]:
        at = self.layout.coordinates(rank)
        dense, expert = (at.dp, at.cp, at.tp), (at.edp, at.ep, at.etp)
        for unit in self._units[at.pp]:
            key = (unit.kind, *(dense if unit.specs[0].ep_dim is None else expert))
            cut = self._cuts.get(key)
            if cut is None:
                cut = self._cuts[key] = _cut(unit, self.layout, at)
            yield unit, cut


def pieces(schema: Schema, layout: Layout, rank: int) -> tuple[Piece, ...]:
    """What ``rank`` holds under ``layout``, in schema order; empty boxes are left out."""
    return ShardMap(schema, layout).pieces(rank)


def _stages(spec: TensorSpec, layout: Layout, stage_of: Mapping[int, int]) -> set[int]:
    """Pipeline ranks that hold a tensor."""
    match spec.where:
        case "all":
            return set(range(layout.pp))
        case "first":
            return {0}
        case "last":
            return {layout.pp - 1}
        case "ends":
            return {0, layout.pp - 1}
        case "layer":
            assert spec.layer is not None, spec.name
            return {stage_of[spec.layer] % layout.pp}


def _cut(unit: _Unit, layout: Layout, at: Coordinates) -> _Cut:
    """Cuts are torch's: expert and tensor parallelism, then joining, then FSDP2 on what is left."""
    spec = unit.specs[0]
    boxes = [_before_fsdp(spec, layout, at) for spec in unit.specs]
    found = [_Segment(part, offset, size, (0,) * len(size)) for part, (offset, size, _) in enumerate(boxes)]
    whole = list(boxes[0][2])
    if unit.fused is not None:
        dim = unit.fused.dim
        runs = join([local[dim] for _, _, local in boxes], unit.fused.blocks)
        found = [_narrow(found[part], dim, first, length, start) for part, first, start, length in runs]
        whole[dim] = sum(local[dim] for _, _, local in boxes)
    parts, index = (
        (layout.edp, at.edp) if spec.ep_dim is not None else (layout.dp * layout.cp, at.dp * layout.cp + at.cp)
    )
    if whole and spec.fsdp_dims:
        dim = _fsdp_dim(spec, layout, parts)
        first, whole[dim] = chunk(whole[dim], parts, index)
        found = [_narrow(s, dim, first - s.start[dim], whole[dim], 0) for s in found]
    if spec.dims is not None:
        assert unit.fused is None, f"{spec.name} cannot be part of a fused tensor"
        dims, shape = spec.dims, spec.shape

        def project(values: Sequence[int], own: Sequence[int]) -> tuple[int, ...]:
            return tuple(own[i] if dim is None else values[dim] for i, dim in enumerate(dims))

        nothing = (0,) * len(shape)
        found = [
            _Segment(0, project(s.offset, nothing), project(s.size, shape), project(s.start, nothing)) for s in found
        ]
        whole = list(project(whole, shape))
    return tuple(whole), tuple(segment for segment in found if 0 not in segment.size)


def _cuts_copies_differently(unit: _Unit, layout: Layout) -> bool:
    """Whether tensor-parallel ranks share heads of a fused tensor that FSDP cuts at other rows on one than another.

    It happens where they are joined with unequally many rows of something else.
    """
    assert unit.fused is not None
    spec, dim = unit.specs[0], unit.fused.dim
    tp, shards = (layout.tp, layout.dp * layout.cp) if spec.ep_dim is None else (layout.etp, layout.edp)
    if shards == 1 or not any(one.heads is not None and one.heads < tp for one in unit.specs):
        return False
    ranks = map(layout.coordinates, range(layout.dp * layout.cp * layout.tp))
    boxes = {(s.part, s.offset[dim], s.offset[dim] + s.size[dim]) for at in ranks for s in _cut(unit, layout, at)[1]}
    return any(one[0] == after[0] and after[1] < one[2] for one, after in pairwise(sorted(boxes)))


def _fsdp_dim(spec: TensorSpec, layout: Layout, parts: int) -> int:
    """The same on all ranks: torchtitan cuts experts along another dim when there are fewer of them than ranks."""
    shape = spec.shape if spec.parameter is None else spec.parameter
    tp = layout.tp if spec.ep_dim is None else layout.etp
    for dim in spec.fsdp_dims:
        if shape[dim] >= parts * (tp if dim == spec.tp_dim else 1) * (layout.ep if dim == spec.ep_dim else 1):
            return dim
    return spec.fsdp_dims[-1]


def _before_fsdp(
    spec: TensorSpec, layout: Layout, at: Coordinates
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(offset, size, size of the local tensor) of one tensor after expert and tensor parallelism."""
    shape = spec.shape if spec.parameter is None else spec.parameter
    offset, size = [0] * len(shape), list(shape)
    parts, index = layout.tp, at.tp
    if spec.ep_dim is not None:
        parts, index = layout.etp, at.etp
        offset[spec.ep_dim], size[spec.ep_dim] = chunk(shape[spec.ep_dim], layout.ep, at.ep)
    local, dim = list(size), spec.tp_dim
    if dim is not None:
        if spec.heads is not None:
            offset[dim], size[dim] = head_chunk(shape[dim], spec.heads, parts, index)
            local[dim] = size[dim]
        elif spec.pad_to:
            offset[dim], size[dim], local[dim] = padded_chunk(shape[dim], spec.pad_to, parts, index)
        else:
            offset[dim], size[dim] = chunk(shape[dim], parts, index)
            local[dim] = size[dim]
    return tuple(offset), tuple(size), tuple(local)


def _narrow(segment: _Segment, dim: int, first: int, length: int, start: int) -> _Segment:
    """The part of a segment in rows [first, first + length) along ``dim``; row ``first`` then is at ``start``."""
    lower, upper = max(first, 0), min(first + length, segment.size[dim])

    def at(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    return _Segment(
        segment.part,
        at(segment.offset, segment.offset[dim] + lower),
        at(segment.size, max(0, upper - lower)),
        at(segment.start, start + lower - first),
    )
