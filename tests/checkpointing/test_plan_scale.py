"""Planning for clusters: seconds of one core for thousands of ranks, and how they grow."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass

import pytest

from checkpointing.arena import ArenaAddress
from checkpointing.boxes import volume
from checkpointing.cover import newest_complete
from checkpointing.holding import Holding
from checkpointing.layout import Layout
from checkpointing.schema import Schema, ShardMap, TensorSpec
from checkpointing.snapshot import Record, Snapshot
from checkpointing.transfer import Destination, Planner

RANKS_PER_NODE = 8
# Shape and tp_dim of a layer's tensors, as in a model of 70 billion parameters: 125 layers are 1,000 tensors.
LAYER = [
    ((8192, 8192), 0),
    ((1024, 8192), 0),
    ((1024, 8192), 0),
    ((8192, 8192), 1),
    ((28672, 8192), 0),
    ((28672, 8192), 0),
    ((8192, 28672), 1),
    ((8192,), None),
]
SCHEMA = Schema(
    tuple(
        TensorSpec(f"layers.{layer}.w{index}", shape, "float32", tp_dim, "layer", layer)
        for layer in range(125)
        for index, (shape, tp_dim) in enumerate(LAYER)
    ),
    125,
)


@dataclass(frozen=True)
class Planned:
    seconds: float  # of one core, from what the keepers report to the last destination's plan
    num_parts: int
    bytes_moved: int
    bytes_lower_bound: int


def holdings(layout: Layout) -> list[Holding]:
    shards, found = ShardMap(SCHEMA, layout), []
    for rank in range(layout.size):
        records = tuple(Record(piece, "float32", 0, 4 * volume(piece), "") for piece in shards.pieces(rank))
        snapshot = Snapshot(1, 1, rank, str(layout), records, {})
        node = f"n{rank // RANKS_PER_NODE}"
        found.append(Holding(snapshot, 0, node, "primary", "memory", ArenaAddress(0, (), 0, "")))
    return found


def plan(before: str, after: str) -> Planned:
    """Every destination by itself: what was planned for one is dropped before the next."""
    held, layout = holdings(Layout.parse(before)), Layout.parse(after)
    begun = time.process_time()
    assert newest_complete(SCHEMA, held) == (1, 1)
    planner, shards, num_parts = Planner(SCHEMA, held), ShardMap(SCHEMA, layout), 0
    for rank in range(layout.size):
        destination = Destination(f"n{rank // RANKS_PER_NODE}", shards.pieces(rank))
        num_parts += sum(len(fetch.parts) for fetch in planner.fetches(destination))
    seconds = time.process_time() - begun
    return Planned(seconds, num_parts, planner.bytes_moved, planner.bytes_lower_bound)


def test_plan_scale(prove: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds per part do not grow with the cluster; to 16,384 ranks under `make prove`."""
    rates = []
    for dp in (2, 8, 32, 128) if prove else (2, 8):
        before, after = f"pp16·dp{dp}·tp8", f"pp8·dp{2 * dp}·tp8"
        planned = plan(before, after)
        rates.append(planned.seconds / planned.num_parts)
        assert planned.bytes_moved == planned.bytes_lower_bound > 0
        assert planned.seconds < (10 if dp <= 8 else 60)
        with capsys.disabled() if prove else nullcontext():
            print(
                f"\n{Layout.parse(before).size:6d} ranks, {before} to {after}: {planned.seconds:6.2f} s for "
                f"{planned.num_parts} parts, {1e6 * rates[-1]:.1f} us each, {planned.bytes_moved / 1e9:.0f} GB to move"
            )
    assert len(SCHEMA.tensors) == 1000
    assert rates[-1] < 3 * rates[0]
