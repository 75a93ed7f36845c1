"""``pieces`` against the shards that torch makes itself: DTensor tensor and expert parallelism, then FSDP2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from checkpointing.layout import Layout
from checkpointing.schema import Piece, Schema, ShardMap, TensorSpec

SHAPES = [(5, 7), (7, 5), (8, 8), (1, 3), (3, 1), (2, 11), (13, 4), (6,), (3,), (1,)]
EXPERTS = [(8, 4, 6), (4, 8, 12), (6, 8, 4), (2, 8, 8), (1, 8, 8)]


@contextmanager
def ranks_of(layout: Layout) -> Iterator[Iterator[int]]:
    """Play one rank after the other in this process; a fake group moves no data."""

    def play() -> Iterator[int]:
        for rank in range(layout.size):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.size)
            try:
                yield rank
            finally:
                dist.destroy_process_group()

    played = play()
    try:
        yield played
    finally:
        played.close()


def mesh_of(**axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def torch_piece(
    shape: tuple[int, ...], mesh: DeviceMesh, parallel: dict[str, Placement], shard: str, fsdp_dim: int = 0
) -> Piece | None:
    """What this rank really holds: every element carries its own index, so the local values say where it came from."""
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    # src_data_rank=None: cut locally, since nothing is sent
    tensor = distribute_tensor(whole, mesh[tuple(parallel)], list(parallel.values()), src_data_rank=None)
    module = nn.Module()
    module.weight = nn.Parameter(tensor)
    data_mesh = mesh["r", shard] if mesh["r"].size() > 1 else mesh[shard]
    fully_shard(module, mesh=data_mesh, shard_placement_fn=lambda _: Shard(fsdp_dim))
    assert isinstance(module.weight, DTensor)
    local = module.weight.to_local().detach()
    if local.numel() == 0:
        return None
    offset = tuple(map(int, np.unravel_index(int(local.flatten()[0]), shape)))
    piece = Piece("w", offset, tuple(local.shape))
    assert torch.equal(local, whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))])
    return piece


def made(spec: TensorSpec, layout: Layout, rank: int) -> Piece | None:
    """What the shard map says; one tensor's piece fills the local tensor."""
    (local,) = ShardMap(Schema((spec,), 1), layout).local(rank)
    if not local.places:
        return None
    ((piece, start),) = local.places
    assert local.size == piece.size and not any(start)
    return piece


@pytest.mark.parametrize("text", ["dp4", "tp4", "dp2·tp2", "dp3·tp2", "dp2·tp3", "r2·dp2", "r2·dp3·tp2", "dp2·cp2·tp2"])
def test_dense_pieces_are_the_shards_that_torch_makes(text: str) -> None:
    """FSDP2, HSDP, both with tensor parallelism (strided where they cut the same dim), and FSDP over dp x cp."""
    layout = Layout.parse(text)
    with ranks_of(layout) as ranks:
        for rank in ranks:
            mesh = mesh_of(r=layout.r, fsdp=layout.dp * layout.cp, tp=layout.tp)
            for shape in SHAPES:
                for tp_dim in (None, *range(len(shape))):
                    placement = Replicate() if tp_dim is None else Shard(tp_dim)
                    expected = torch_piece(shape, mesh, {"tp": placement}, "fsdp")
                    spec = TensorSpec("w", shape, "float32", tp_dim, "first")
                    assert made(spec, layout, rank) == expected, (shape, tp_dim, rank)


@pytest.mark.parametrize(
    "text",
    ["dp4·ep2", "dp4·ep4", "dp2·tp2·ep2", "dp2·tp2·ep2·etp2", "dp2·cp2·tp2·ep2·etp2", "r2·dp2·tp2·ep4", "dp3·ep3"],
)
def test_expert_pieces_are_the_shards_that_torch_makes(text: str) -> None:
    """Experts on a mesh of their own over the same ranks; FSDP cuts dim 1 where there are fewer experts than ranks."""
    layout = Layout.parse(text)
    with ranks_of(layout) as ranks:
        for rank in ranks:
            mesh = mesh_of(r=layout.r, edp=layout.edp, ep=layout.ep, etp=layout.etp)
            for shape in EXPERTS:
                for tp_dim in (None, 1, 2):
                    placement = Replicate() if tp_dim is None else Shard(tp_dim)
                    fsdp_dim = 1 if layout.edp * layout.ep > shape[0] else 0  # as torchtitan chooses
                    expected = torch_piece(shape, mesh, {"ep": Shard(0), "etp": placement}, "edp", fsdp_dim)
                    spec = TensorSpec("w", shape, "float32", tp_dim, "first", fsdp_dims=(0, 1), ep_dim=0)
                    assert made(spec, layout, rank) == expected, (shape, tp_dim, rank)


def test_fsdps_trailing_shards_are_uneven_and_empty() -> None:
    layout = Layout.parse("dp4")
    shards = ShardMap(Schema((TensorSpec("w", (5, 3), "float32", None, "all"),), 1), layout)
    assert [[piece.size[0] for piece in shards.pieces(rank)] for rank in range(4)] == [[2], [2], [1], []]
    assert shards.local(3)[0].size == (0, 3)
