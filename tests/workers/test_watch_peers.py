"""Busy ranks learn at once that a peer died, and are not alarmed by one that leaves in good order."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.workers.fenced_ranks import Pool, Rank, check_sums

WORLD_SIZE = 4
KNOWN_WITHIN_S = 0.5


def compute_until_fenced(rank: Rank, number: int, index: int, world_size: int) -> tuple[float, str]:
    """No operation is under way. Returns when (monotonic) the fence tripped, and why."""
    generation = rank.form(number, index, world_size)
    dist.new_group([0, 1])  # others' connections come and go; the watched ones lead to everybody
    generation.watch_peers()
    rank.tell("watching")
    tripped = threading.Event()
    rank.fence.on_trip(tripped.set)
    tripped.wait(10)
    known = time.monotonic()
    generation.dissolve()
    return known, rank.fence.cause


@pytest.mark.parametrize("victim", range(WORLD_SIZE))
def test_a_death_is_known_without_an_operation(pool: Pool, victim: int) -> None:
    ranks, number = list(pool.ranks(WORLD_SIZE)), pool.next_number()
    for index, process in enumerate(ranks):
        process.start(compute_until_fenced, number, index, WORLD_SIZE)
    for process in ranks:
        process.told()
    dead = ranks.pop(victim)
    began = time.monotonic()
    dead.signal(signal.SIGKILL)
    for known, cause in [process.result(timeout=20) for process in ranks]:
        assert known - began < KNOWN_WITHIN_S
        assert cause.endswith("closed the connection")
    pool.remove(dead)
    assert [total for _, total in pool.run_on(ranks, check_sums)] == [6.0] * 3


def leave_one_by_one(rank: Rank, number: int, index: int, world_size: int) -> bool:
    """Whether the fence tripped, although all left after the same operation."""
    generation = rank.form(number, index, world_size)
    generation.watch_peers()
    dist.all_reduce(torch.ones(1 << 20))
    generation.let_peers_go()
    dist.all_reduce(torch.ones(1 << 20))
    generation.dissolve()
    return rank.fence.tripped


def test_who_leaves_in_good_order_alarms_nobody(pool: Pool) -> None:
    for _ in range(20):
        assert pool.run(WORLD_SIZE, leave_one_by_one) == [False] * WORLD_SIZE
