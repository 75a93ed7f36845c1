"""Live state between processes over a gloo group: any layout to any other, bitwise, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch.distributed as dist

from checkpointing.group_exchange import GroupExchange
from checkpointing.holding import DigestMismatch
from checkpointing.layout import Layout
from checkpointing.live import live_node, load_live
from checkpointing.load import Moved
from checkpointing.schema import Schema, TensorSpec, pieces
from tests.checkpointing.live_ranks import move, plan_between
from tests.checkpointing.node_keepers import TINY, cut, random_reference
from tests.workers.engine_ranks import NUM_RANKS, Ranks

STEPS = ["dp8", "tp4·dp2", "pp4·tp2", "pp2·dp2·tp2", "r2·dp3", "1", "pp3·tp2"]
BIG = Schema(tuple(TensorSpec(f"w{i}", (2048, 1024), "float32", 1, "all") for i in range(6)), 1)  # 48 MiB
EVERYBODY = Layout(dp=NUM_RANKS)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


def walk(layout: Layout, rank: int) -> list[int]:
    steps = [Layout.parse(text) for text in STEPS]
    return [move(rank, TINY, *pair, 4096)[0].received for pair in zip(steps, steps[1:], strict=False)]


def test_a_walk_is_bitwise_and_moves_only_what_must_move(ranks: Ranks) -> None:
    received = ranks.run(walk, EVERYBODY)
    steps = [Layout.parse(text) for text in STEPS]
    for index, pair in enumerate(zip(steps, steps[1:], strict=False)):
        plan = plan_between(TINY, *pair)
        assert sum(rank[index] for rank in received) == plan.bytes_moved == plan.bytes_lower_bound


def columns(layout: Layout, rank: int) -> tuple[Moved, int]:
    return move(rank, BIG, Layout(tp=4), Layout(dp=4), 2 << 20)


def test_a_view_is_sent_alone_and_memory_stays_bounded(ranks: Ranks) -> None:
    state = sum(4 * 2048 * 1024 for _ in BIG.tensors)
    for moved, grown in ranks.run(columns, Layout(dp=4)):
        assert moved.received == state // 4 * 3 // 4
        assert 0 < moved.staged <= 2 << 20
        assert grown < 6 << 20, "far less than the 12 MiB that a rank holds"


def damaged(layout: Layout, rank: int) -> str:
    """A bit flips between the sender's digest and the receiver's."""

    class Flipping(GroupExchange):
        def _pack(self, asked, expected):
            wave = super()._pack(asked, expected)
            if self._rank == 0 and wave._sent.numel():
                wave._sent[-1] ^= 1
            return wave

    before, after = Layout(dp=3), Layout(tp=3)
    reference = random_reference(TINY, seed=3)
    held = {p: cut(reference, p) for p in pieces(TINY, before, rank)}
    into = {p: np.empty(p.size, reference[p.name].dtype) for p in pieces(TINY, after, rank)}
    others = Flipping(dist.group.WORLD, held, {live_node(other): other for other in range(3)}, 1024)
    try:
        load_live(plan_between(TINY, before, after).fetches[rank], into, held, others)
    except DigestMismatch as error:
        return f"{error.key}"
    return ""


def test_damage_on_the_way_is_found_and_nobody_is_left_waiting(ranks: Ranks) -> None:
    keys = ranks.run(damaged, Layout(dp=3))
    assert keys[0] == "" and all(key.startswith("('00000', 'primary'") for key in keys[1:])
