"""The canonical space: one unpadded, unfused tensor per name, and which box of it a rank holds.

Everything here is pure: from a schema, a layout and a rank follow the boxes, whether the rank exists or not.
"""

from __future__ import annotations

from dataclasses import dataclass

from checkpointing.layout import Layout


@dataclass(frozen=True)
class TensorSpec:
    """One canonical tensor and how layouts cut it.

    name   "layers.3.attention.wq.weight" for a parameter, "exp_avg/layers.3.attention.wq.weight" for optimizer state
    shape  canonical shape; () for a scalar
    dtype  numpy name ("float32", "int64"; "bfloat16" is stored as its own 2-byte name)
    tp_dim tensor dim that tensor parallelism cuts; None: every tensor-parallel rank holds all of it
    layer  decoder layer index; None: held by the first stage ("first"), the last ("last") or every stage ("all")
    where  "layer" | "first" | "last" | "all"
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tp_dim: int | None
    where: str
    layer: int | None = None
    fsdp: bool = True  # False: data-parallel ranks all hold the whole (scalars such as the optimizer's step)


@dataclass(frozen=True)
class Schema:
    """All tensors of a training state, in a fixed order. ``num_layers`` is what pipeline stages divide."""

    tensors: tuple[TensorSpec, ...]
    num_layers: int


@dataclass(frozen=True, order=True)
class Piece:
    """A half-open box of one canonical tensor: ``offset[d] <= i_d < offset[d] + size[d]``."""

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]


def pieces(schema: Schema, layout: Layout, rank: int) -> tuple[Piece, ...]:
    """What ``rank`` holds under ``layout``, in schema order; empty boxes are left out.

    Cuts are torch's: tensor parallelism first (``tp_dim``), then FSDP2 on dim 0 of what is left, both with
    ``torch.chunk`` sizes (5 rows over 4 ranks are 2, 2, 1, 0).
    """
    at = layout.coordinates(rank)
    layers = layout.stage_layers(at.pp, schema.num_layers)
    held = []
    for spec in schema.tensors:
        if not (
            spec.where == "all"
            or (spec.where == "first" and at.pp == 0)
            or (spec.where == "last" and at.pp == layout.pp - 1)
            or (spec.where == "layer" and spec.layer in layers)
        ):
            continue
        offset, size = [0] * len(spec.shape), list(spec.shape)
        if spec.tp_dim is not None:
            _cut(offset, size, spec.tp_dim, layout.tp, at.tp)
        if spec.fsdp and spec.shape:
            _cut(offset, size, 0, layout.dp, at.dp)
        if all(size):
            held.append(Piece(spec.name, tuple(offset), tuple(size)))
    return tuple(held)


def _cut(offset: list[int], size: list[int], dim: int, parts: int, index: int) -> None:
    """Narrow the box in place to chunk ``index`` of ``parts`` along ``dim``, with torch.chunk's sizes."""
    chunk = -(-size[dim] // parts)
    start = min(index * chunk, size[dim])
    stop = min(start + chunk, size[dim])
    offset[dim] += start
    size[dim] = stop - start
