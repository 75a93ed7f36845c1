"""Against torch.distributed.checkpoint: what it saves under one layout and loads under another is what ours gives.

Torch works out its own boxes from DTensors, saves, plans and reads. Ours reads what torch saved (imported, then cut for
the other layout), what it saved itself from snapshots, and live state over the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from benchmarks.dcp_state import as_dtensors
from checkpointing import durable
from checkpointing.checkpoint_file import Share
from checkpointing.group_exchange import GroupExchange
from checkpointing.holding import Holding
from checkpointing.layout import Layout
from checkpointing.live import live_holdings, live_node, load_live
from checkpointing.load import KeeperReads, load_state
from checkpointing.publish import Attempt, begin
from checkpointing.schema import Piece, Schema, TensorSpec, pieces
from checkpointing.shares import plan_shares
from checkpointing.snapshot import Snapshot, snapshot_nbytes, write_snapshot
from checkpointing.transfer import Destination, Planner
from orchestrator.interchange import import_tensors, open_source
from tests.checkpointing.node_keepers import cut, random_reference
from tests.workers.engine_ranks import NUM_RANKS, Ranks

# 5 rows over 4 ranks are 2, 2, 1 and none; 16 rows can be cut by tp and then by dp, which torch needs to be even.
SCHEMA = Schema(
    (
        TensorSpec("embedding", (16, 6), "float32", 0, "first"),
        *(
            TensorSpec(f"{state}layers.{i}.up", (16, 5), "float32", 0, "layer", i)
            for state in ("", "m/")
            for i in range(4)
        ),
        *(
            TensorSpec(f"{state}layers.{i}.down", (5, 16), "float64", 1, "layer", i)
            for state in ("", "m/")
            for i in range(4)
        ),
        *(
            TensorSpec(f"{state}layers.{i}.norm", (5,), "float32", None, "layer", i)
            for state in ("", "m/")
            for i in range(4)
        ),
        TensorSpec("output", (16, 6), "float32", 0, "last"),
        TensorSpec("step", (), "int64", None, "all", fsdp_dims=()),
    ),
    4,
)
REFERENCE = random_reference(SCHEMA, seed=11)
MOVES = [
    ("dp4", "tp4"),
    ("tp4", "pp2·dp2·tp2"),
    ("pp2·dp2·tp2", "dp3"),
    ("dp3", "pp4·tp2"),
    ("pp4·tp2", "dp8"),
    ("dp8", "dp2·tp2"),
    ("pp3·dp2", "1"),
    ("1", "dp2·tp4"),
]
State = dict[Piece, np.ndarray]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


def held_by(layout: Layout, rank: int) -> State:
    return {piece: cut(REFERENCE, piece).copy() for piece in pieces(SCHEMA, layout, rank)}


def room_for(layout: Layout, rank: int) -> State:
    return {piece: np.zeros(piece.size, REFERENCE[piece.name].dtype) for piece in pieces(SCHEMA, layout, rank)}


def save(layout: Layout, rank: int, folder: Path, attempt: Attempt) -> tuple[Snapshot, list[dict[str, Any]]]:
    """Both saves. Ours as a keeper does it: this rank's shares of all, from its snapshot."""
    held = held_by(layout, rank)
    dcp.save(torch_state(layout, rank, held), checkpoint_id=folder / "dcp")
    buffer = np.empty(snapshot_nbytes(held), np.uint8)
    snapshot = Snapshot(1, 1, rank, str(layout), write_snapshot(buffer, held), {})
    records = {record.piece: record for record in snapshot.records}
    shares = plan_shares(SCHEMA, live_holdings(SCHEMA, layout))[live_node(rank)]
    mine = [(Share(share.holding, records[share.record.piece], share.dtype, share.file), buffer) for share in shares]
    return snapshot, durable.write_share(attempt.url, mine)


def load(layout: Layout, rank: int, folder: Path, holdings: list[Holding]) -> None:
    """Both loads, into memory of their own, compared by torch's names and bit by bit."""
    theirs, ours = room_for(layout, rank), room_for(layout, rank)
    loaded = torch_state(layout, rank, theirs)
    dcp.load(loaded, checkpoint_id=folder / "dcp")
    fetches = Planner(SCHEMA, holdings).fetches(Destination("node", tuple(ours)))
    load_state(fetches, ours, KeeperReads(lambda node, requests: pytest.fail("files are read in place")))
    mine = torch_state(layout, rank, ours)
    for name, tensor in loaded.items():
        assert local_bytes(tensor) == local_bytes(mine[name]), (layout, name)
    for piece, array in ours.items():
        assert array.tobytes() == cut(REFERENCE, piece).tobytes(), (layout, piece)


def exchange(everybody: Layout, rank: int, before: Layout, after: Layout) -> None:
    """Ours once more, from live state over the group."""
    held = held_by(before, rank) if rank < before.size else {}
    into = room_for(after, rank) if rank < after.size else {}
    fetches = Planner(SCHEMA, live_holdings(SCHEMA, before)).fetches(Destination(live_node(rank), tuple(into)))
    nodes = {live_node(other): other for other in range(NUM_RANKS)}
    load_live(fetches, into, held, GroupExchange(dist.group.WORLD, held, nodes))
    for piece, array in into.items():
        assert array.tobytes() == cut(REFERENCE, piece).tobytes(), (before, after, piece)


def torch_state(layout: Layout, rank: int, state: State) -> dict[str, torch.Tensor]:
    """``state`` as DTensors under the names that torch gives an optimizer's state."""
    renamed = {}
    for name, tensor in as_dtensors(SCHEMA, layout, rank, state).items():
        kind, _, parameter = name.rpartition("/")
        renamed[f"optim.state.{parameter}.{kind}" if kind else parameter] = tensor
    return renamed


def local_bytes(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.contiguous().numpy().tobytes()


@pytest.mark.parametrize("move", MOVES, ids=" to ".join)
def test_torch_and_ours_load_the_same_bits(ranks: Ranks, tmp_path: Path, move: tuple[str, str]) -> None:
    before, after = map(Layout.parse, move)
    attempt = begin(str(tmp_path / "ours"), 1)
    saved = ranks.run(save, before, tmp_path, attempt)
    files = [entry for _, entries in saved for entry in entries]
    checkpoint = durable.commit(attempt, SCHEMA, saved[0][0], files)
    ranks.run(load, after, tmp_path, durable.checkpoint_holdings(checkpoint))
    imported, num_states = import_tensors(open_source(str(tmp_path / "dcp")), SCHEMA, str(tmp_path / "imported"))
    assert num_states == sum("/" in spec.name for spec in SCHEMA.tensors)
    ranks.run(load, after, tmp_path, durable.checkpoint_holdings(imported))
    ranks.run(exchange, Layout(dp=NUM_RANKS), before, after)
