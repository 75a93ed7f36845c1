"""Fenced groups: survivors get out of any operation, form again and compute rightly; and they equal stock gloo."""

from __future__ import annotations

import random
import signal
import statistics
import time
from pathlib import Path

import pytest

from tests.workers.fenced_operations import (
    form_only,
    hybrid_step,
    hybrid_until_fenced,
    late_message,
    leave,
    many_generations,
    numerical_results,
    outlast_the_timeout,
    time_operations,
    wait_longer_than_allowed,
    wrong_argument,
)
from tests.workers.fenced_ranks import OPERATIONS, Pool, check_sums, repeat_until_fenced

WORLD_SIZE = 4
OUT_WITHIN_S = 1.0


def _lose_one(pool: Pool, operation: str, rng: random.Random, stop: bool) -> list[float]:
    """Take one rank out in the middle of ``operation``; returns how long each survivor needed to get out (seconds)."""
    ranks, number = list(pool.ranks(WORLD_SIZE)), pool.next_number()
    for index, process in enumerate(ranks):
        process.start(repeat_until_fenced, number, index, WORLD_SIZE, operation)
    for process in ranks:
        process.told()
    time.sleep(rng.uniform(0, 0.03))  # where in the operation it falls
    victim = ranks.pop(rng.randrange(WORLD_SIZE))
    began = time.monotonic()
    victim.signal(signal.SIGSTOP if stop else signal.SIGKILL)
    if stop:  # no socket closes, so nobody can know: the driver, who finds the rank silent, tells them
        for process in ranks:
            process.trip("a rank is silent")
    outs = [process.result(timeout=10) for process in ranks]
    assert all(cause for _, cause in outs)
    sums = pool.run_on(ranks, check_sums)
    assert [total for _, total in sums] == [6.0] * 3
    pool.remove(victim)
    return [out - began for out, _ in outs]


def _milliseconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ms (median of {len(seconds)}; most {max(seconds) * 1e3:.1f})"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_survivors_leave_an_operation_when_a_peer_is_killed(pool: Pool, operation: str, prove: bool) -> None:
    rng = random.Random(operation)
    seconds = [s for _ in range(48 if prove else 4) for s in _lose_one(pool, operation, rng, stop=False)]
    print(f"{operation}, SIGKILL: out in {_milliseconds(seconds)}")
    assert max(seconds) < OUT_WITHIN_S


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_trip_frees_survivors_from_a_silent_peer(pool: Pool, operation: str, prove: bool) -> None:
    rng = random.Random(operation)
    seconds = [s for _ in range(24 if prove else 1) for s in _lose_one(pool, operation, rng, stop=True)]
    print(f"{operation}, trip: out in {_milliseconds(seconds)}")
    assert max(seconds) < OUT_WITHIN_S


def test_operations_equal_stock_gloo(pool: Pool, tmp_path: Path) -> None:
    for mismatches, num_compared in pool.run(WORLD_SIZE, numerical_results, str(tmp_path / "store")):
        assert mismatches == []
        assert num_compared > 100


def test_hybrid_step_equals_stock_gloo(pool: Pool, tmp_path: Path) -> None:
    """pp2 x replicate2 x shard2: a 1F1B pipeline of FSDP2 stages, collectives from the backward's thread included."""
    for difference in pool.run(8, hybrid_step, str(tmp_path / "store")):
        assert difference <= 1e-6


def test_a_hybrid_step_is_left_when_a_peer_is_killed(pool: Pool) -> None:
    ranks, number = list(pool.ranks(8)), pool.next_number()
    for index, process in enumerate(ranks):
        process.start(hybrid_until_fenced, number, index, 8)
    for process in ranks:
        process.told()
    victim = ranks.pop(5)
    began = time.monotonic()
    victim.signal(signal.SIGKILL)
    seconds = [process.result(timeout=10)[0] - began for process in ranks]
    print(f"hybrid step, SIGKILL: out in {_milliseconds(seconds)}")
    assert max(seconds) < 2 * OUT_WITHIN_S  # compute between two operations is not interrupted
    pool.run_on(ranks, check_sums)
    pool.remove(victim)


def test_a_receive_may_take_longer_than_forming_the_group(pool: Pool) -> None:
    assert pool.run(2, late_message, 1.0) == [0.0, 0.0]


def test_nothing_grows_over_generations(pool: Pool, prove: bool) -> None:
    num_generations = 200 if prove else 50
    for seen in pool.run(WORLD_SIZE, many_generations, num_generations):
        print(f"formed in {statistics.median(seen['seconds']) * 1e3:.1f} ms (median of {num_generations})")
        for kind in ("descriptors", "threads"):
            assert seen[kind][-1] <= seen[kind][4] + 2, (kind, seen[kind])
    for _ in range(num_generations):
        pool.next_number()


def test_a_missing_rank_is_named_at_the_deadline(pool: Pool) -> None:
    ranks, number = pool.ranks(WORLD_SIZE), pool.next_number()
    for index in (0, 1, 3):
        ranks[index].start(form_only, number, index, WORLD_SIZE, 0.5)
    for index in (0, 1, 3):
        error = ranks[index].error(timeout=5)
        assert "RendezvousError: rank 2 did not come within 0.5 s" in error
    pool.run(WORLD_SIZE, check_sums)  # groups are named alike again after the failure


def test_a_trip_ends_forming(pool: Pool) -> None:
    ranks, number = pool.ranks(2), pool.next_number()
    ranks[0].start(form_only, number, 0, 2, 30.0)
    time.sleep(0.1)  # most likely it waits for rank 1 by now; the outcome is the same if not
    ranks[0].trip("changed our mind")
    assert "changed our mind" in ranks[0].error(timeout=5)
    pool.run(2, check_sums)


def test_a_rank_killed_while_forming_ends_it_by_the_deadline(pool: Pool, prove: bool) -> None:
    rng = random.Random(0)
    for _ in range(48 if prove else 8):
        ranks, number = list(pool.ranks(WORLD_SIZE)), pool.next_number()
        for index, process in enumerate(ranks):
            process.start(form_only, number, index, WORLD_SIZE, 0.7)
        time.sleep(rng.uniform(0, 0.02))  # where in the forming it falls
        victim = ranks.pop(rng.randrange(WORLD_SIZE))
        began = time.monotonic()
        victim.signal(signal.SIGKILL)
        for process in ranks:
            process.end_of_run(timeout=10)
        assert time.monotonic() - began < 3.0  # the ranks come together once, and connect once
        assert [total for _, total in pool.run_on(ranks, check_sums)] == [6.0] * 3
        pool.remove(victim)


def test_an_older_generation_is_refused(pool: Pool) -> None:
    number = pool.next_number()
    pool.run(2, check_sums)
    process = pool.ranks(1)[0]
    process.start(form_only, number, 0, 2, 5.0)
    assert f"generation {number} is over: generation {number + 1} has begun" in process.error(timeout=2)


def test_a_wait_longer_than_allowed_is_fenced(pool: Pool) -> None:
    ranks, number = pool.ranks(2), pool.next_number()
    for index, process in enumerate(ranks):
        process.start(wait_longer_than_allowed, number, index, 2)
    assert all(process.error(timeout=5).startswith("Fenced: ") for process in ranks)


def test_an_operation_longer_than_the_timeout_is_fenced(pool: Pool) -> None:
    ranks, number = pool.ranks(2), pool.next_number()
    for index, process in enumerate(ranks):
        process.start(outlast_the_timeout, number, index, 2)
    assert ranks[1].result() is None
    began = time.monotonic()
    assert ranks[0].error(timeout=10).startswith("Fenced: ")
    assert time.monotonic() - began < 3.0
    pool.run_on([ranks[1]], leave)
    pool.run(2, check_sums)


def test_a_wrong_argument_is_the_callers_and_ends_nothing(pool: Pool) -> None:
    for message in pool.run(2, wrong_argument):
        assert message.startswith("RuntimeError: ")


def test_cost_beside_stock_gloo(pool: Pool, tmp_path: Path) -> None:
    """Prints the figures; asserts only what no busy machine can blur."""
    for world_size in (WORLD_SIZE, 8):
        seconds = [second for _ in range(5) for second, _ in pool.run(world_size, check_sums)]
        print(f"formed at world {world_size}: median {statistics.median(seconds) * 1e3:.1f} ms")
    for name, (stock, fenced) in pool.run(WORLD_SIZE, time_operations, str(tmp_path / "store"))[0].items():
        print(f"{name}: stock gloo {stock:.2f} ms, fenced {fenced:.2f} ms")
        assert fenced < 10 * stock + 5
