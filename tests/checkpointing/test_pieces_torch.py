"""``pieces`` against the shards that torch itself makes: DTensor tensor parallelism, then ``fully_shard``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from checkpointing.layout import Layout
from checkpointing.schema import Piece, Schema, TensorSpec, pieces

SHAPES = [(5, 7), (7, 5), (8, 8), (1, 3), (3, 1), (2, 11), (13, 4)]


def torch_piece(name: str, shape: tuple[int, ...], tp_dim: int | None, layout: Layout, rank: int) -> Piece | None:
    """What this rank really holds: every element carries its own index, so the local values say where it came from."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.size)
    try:
        mesh = init_device_mesh("cpu", (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
        whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
        placement = Replicate() if tp_dim is None else Shard(tp_dim)
        # src_data_rank=None: cut locally, since a fake group moves no data
        cut = distribute_tensor(whole, mesh["tp"], [placement], src_data_rank=None)
        module = nn.Module()
        module.weight = nn.Parameter(cut)
        fully_shard(module, mesh=mesh["dp"])
        assert isinstance(module.weight, DTensor)
        local = module.weight.to_local().detach()
    finally:
        dist.destroy_process_group()
    if local.numel() == 0:
        return None
    first = int(local.flatten()[0])
    piece = Piece(name, (first // shape[1], first % shape[1]), tuple(local.shape))
    rows, columns = (slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))
    assert torch.equal(local, whole[rows, columns])
    return piece


@pytest.mark.parametrize("layout", ["dp2·tp2", "dp3·tp2", "dp2·tp3", "dp4", "tp4"])
def test_pieces_are_the_shards_that_torch_makes(layout: str) -> None:
    made = Layout.parse(layout)
    for shape in SHAPES:
        for tp_dim in (0, 1, None):
            schema = Schema((TensorSpec("w", shape, "float32", tp_dim, "first"),), 1)
            for rank in range(made.size):
                expected = torch_piece("w", shape, tp_dim, made, rank)
                assert pieces(schema, made, rank) == ((expected,) if expected else ()), (shape, tp_dim, rank)
