"""What one rank does when live state changes its layout over the default process group."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch.distributed as dist

from checkpointing.group_exchange import GroupExchange
from checkpointing.layout import Layout
from checkpointing.live import live_holdings, live_node, load_live
from checkpointing.load import Moved
from checkpointing.schema import Schema, pieces
from checkpointing.transfer import Destination, TransferPlan, plan_transfer
from tests.checkpointing.node_keepers import cut, random_reference


def plan_between(schema: Schema, before: Layout, after: Layout) -> TransferPlan:
    targets = {rank: Destination(live_node(rank), pieces(schema, after, rank)) for rank in range(after.size)}
    return plan_transfer(schema, live_holdings(schema, before), targets)


def move(rank: int, schema: Schema, before: Layout, after: Layout, staging_nbytes: int) -> tuple[Moved, int]:
    """One rank's part; what it has afterwards is compared bit by bit. Also returns the growth of the peak memory."""
    reference = random_reference(schema, seed=3)
    held = {p: cut(reference, p).copy() for p in pieces(schema, before, rank)} if rank < before.size else {}
    into = {}
    if rank < after.size:
        into = {p: np.full(p.size, 0, reference[p.name].dtype) for p in pieces(schema, after, rank)}
    fetches = plan_between(schema, before, after).fetches.get(rank, ())
    nodes = {live_node(other): other for other in range(dist.get_world_size())}
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    peak = peak_memory()
    others = GroupExchange(dist.group.WORLD, held, nodes, staging_nbytes)
    moved = load_live(fetches, into, held, others)
    grown = peak_memory() - peak
    for piece, array in into.items():
        assert array.tobytes() == cut(reference, piece).tobytes(), (before, after, piece)
    return moved, grown


def peak_memory() -> int:
    """Most memory that this process has had resident, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
