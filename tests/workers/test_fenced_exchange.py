"""State exchanged over our fenced groups: as over stock gloo, and a peer's death ends it for all who wait."""

from __future__ import annotations

import signal
import time

import torch.distributed as dist

from checkpointing.layout import Layout
from tests.checkpointing.live_ranks import move
from tests.checkpointing.node_keepers import TINY
from tests.workers.fenced_ranks import Pool, Rank
from workers.fenced_group import Fenced

MOVES = (("dp4", "tp2·dp2"), ("tp2·dp2", "pp3"), ("pp3", "1"), ("1", "pp2·tp2"))


def exchange(rank: Rank, number: int, index: int, world_size: int, rounds: int) -> tuple[int, float, str]:
    """(bytes received, when it ended, why it ended early) of ``rounds`` walks through the layouts."""
    generation = rank.form(number, index, world_size)
    received, cause = 0, ""
    try:
        for done in range(rounds):
            for before, after in MOVES:
                received += move(index, TINY, Layout.parse(before), Layout.parse(after), 4096)[0].received
            if done == 0 and rounds > 1:
                rank.tell("at work")
    except Fenced as error:
        cause = str(error)
    ended = time.monotonic()
    generation.dissolve()
    return received, ended, cause


def test_a_walk_over_a_fenced_group(pool: Pool) -> None:
    received = pool.run_on(list(pool.ranks(4)), exchange, 1)
    assert all(cause == "" for _, _, cause in received) and sum(nbytes for nbytes, _, _ in received) > 0


def test_survivors_leave_an_exchange_and_the_next_one_works(pool: Pool) -> None:
    ranks, number = list(pool.ranks(4)), pool.next_number()
    for index, process in enumerate(ranks):
        process.start(exchange, number, index, 4, 10_000)
    for process in ranks:
        process.told()
    victim = ranks.pop(2)
    began = time.monotonic()
    victim.signal(signal.SIGKILL)
    for _, ended, cause in [process.result(timeout=10) for process in ranks]:
        assert cause and ended - began < 1.0
    pool.remove(victim)
    assert all(not cause for _, _, cause in pool.run_on(list(pool.ranks(4)), exchange, 1))
    assert not dist.is_initialized()
