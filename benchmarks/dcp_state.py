"""A rank's state as torch.distributed.checkpoint takes it: DTensors over the mesh of a layout's stage."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from checkpointing.layout import Layout
from checkpointing.schema import Piece, Schema, ShardMap, TensorSpec


def as_dtensors(
    schema: Schema, layout: Layout, rank: int, state: Mapping[Piece, np.ndarray]
) -> dict[str, torch.Tensor]:
    """``state`` (arrays by piece) without copies; the default process group must have ``layout.size`` ranks.

    ``layout`` has the axes pp, dp and tp. Scalars are plain tensors, as an optimizer has them.
    """
    mesh = init_device_mesh("cpu", (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))["dp", "tp"]
    specs = {spec.name: spec for spec in schema.tensors}
    tensors = {}
    for local in ShardMap(schema, layout).local(rank):
        spec = specs[local.name]
        held = [state[place.piece] for place in local.places]
        array = held[0] if held else np.empty(local.size, spec.dtype)
        tensors[spec.name] = torch.from_numpy(array)
        if spec.shape:
            whole = torch.empty(spec.shape, device="meta")
            tensors[spec.name] = DTensor.from_local(
                tensors[spec.name], mesh, _placements(spec, layout), shape=whole.shape, stride=whole.stride()
            )
    return tensors


def _placements(spec: TensorSpec, layout: Layout) -> tuple[Placement, Placement]:
    """As FSDP2 over tensor parallelism leaves them: what tp has cut along dim 0 is cut further by dp."""
    twice = spec.tp_dim == 0 and layout.tp > 1 and layout.dp > 1
    dp: Placement = _StridedShard(0, split_factor=layout.tp) if twice else Shard(0)
    return dp, Replicate() if spec.tp_dim is None else Shard(spec.tp_dim)
