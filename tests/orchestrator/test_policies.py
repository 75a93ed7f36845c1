"""Decisions as pure functions: which layout, who plays which rank, and when a job ends."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.layout import Layout
from orchestrator.policies import End, FailurePolicy, Go, assign, choose_layout, layouts_of_size
from workers.plan import Member


def any_layout(layout: Layout) -> bool:
    return True


def nothing_moves(layout: Layout) -> int:
    return 0


def parse(*texts: str) -> tuple[Layout, ...]:
    return tuple(Layout.parse(text) for text in texts)


@pytest.mark.parametrize(
    ("num_workers", "chosen"), [(9, "dp2·tp2·pp2"), (8, "dp2·tp2·pp2"), (7, "dp3·pp2"), (5, "tp2"), (1, None)]
)
def test_the_first_layout_of_the_list_that_fits(num_workers: int, chosen: str | None) -> None:
    preferred = parse("dp2·tp2·pp2", "dp3·pp2", "tp2")
    expected = Layout.parse(chosen) if chosen else None
    assert choose_layout(preferred, num_workers, any_layout, nothing_moves) == expected


@given(st.integers(1, 12))
def test_layouts_of_a_size_are_all_there_are(size: int) -> None:
    sizes = range(1, size + 1)
    every = {Layout(pp=pp, dp=dp, tp=tp) for pp in sizes for dp in sizes for tp in sizes if pp * dp * tp == size}
    assert set(layouts_of_size(size)) == every and len(layouts_of_size(size)) == len(every)


@given(st.integers(1, 16), st.sets(st.integers(1, 16)), st.randoms(use_true_random=False))
def test_auto_takes_most_workers_then_fewest_bytes_then_low_tp_and_pp(num_workers: int, bad: set[int], random) -> None:
    costs = {layout: random.randrange(3) for size in range(1, 17) for layout in layouts_of_size(size)}
    possible = [layout for layout in costs if layout.size <= num_workers and layout.size not in bad]
    chosen = choose_layout(None, num_workers, lambda layout: layout.size not in bad, costs.__getitem__)
    if not possible:
        assert chosen is None
        return
    assert chosen in possible
    for other in possible:
        assert (-chosen.size, costs[chosen], chosen.tp, chosen.pp) <= (-other.size, costs[other], other.tp, other.pp)


def members(workers: Mapping[str, str]) -> tuple[Member, ...]:
    return tuple(Member(worker, node) for worker, node in workers.items())


@given(st.integers(1, 6), st.integers(1, 3), st.data())
def test_survivors_keep_their_ranks_and_a_vacancy_stays_on_its_node(num_nodes: int, each: int, data) -> None:
    before = {f"n{node}/{index}": f"n{node}" for node in range(num_nodes) for index in range(each)}
    layout = Layout(dp=len(before))
    dead = data.draw(st.sets(st.sampled_from(sorted(before))))
    standbys = {f"{worker}-standby": node for worker, node in before.items() if worker in dead}
    workers = {worker: node for worker, node in {**standbys, **before}.items() if worker not in dead}
    ranks = assign(layout, workers, (layout, members(before)))
    assert len(set(ranks)) == layout.size
    for member, worker in zip(members(before), ranks, strict=True):
        assert workers[worker] == member.node
        assert member.worker in dead or worker == member.worker


def test_a_vacancy_that_its_node_cannot_fill_goes_to_a_spare_elsewhere() -> None:
    before = {"a/0": "a", "b/0": "b"}
    layout = Layout(dp=2)
    assert assign(layout, {"b/0": "b", "c/0": "c"}, (layout, members(before))) == ("c/0", "b/0")


def test_under_another_layout_ranks_follow_the_placement() -> None:
    workers = {"a/0": "a", "a/1": "a", "b/0": "b"}
    before = (Layout(dp=3), members({"b/0": "b", "a/1": "a", "a/0": "a"}))
    assert assign(Layout(dp=2), workers, before) == assign(Layout(dp=2), workers, None) == ("a/0", "a/1")


def test_equal_failures_end_a_job_unless_a_step_comes_between() -> None:
    policy = FailurePolicy(max_failures=-1, max_identical=3)
    assert policy.decide("boom", "boom is why", 4) == policy.decide("boom", "boom at 7", 4) == Go()
    assert policy.decide("bang", "bang is why", 4) == Go(), "another failure"
    assert policy.decide("boom", "boom is why", 4) == Go()
    assert policy.decide("boom", "boom is why", 5) == Go(), "a step forward"
    assert policy.decide("boom", "boom is why", 3) == Go(), "falling back to a checkpoint is no step forward"
    assert policy.decide("boom", "boom is why", 5) == End(
        "the same failure came 3 times in a row without a step forward: boom is why"
    )


def test_max_failures_counts_all_of_them() -> None:
    policy = FailurePolicy(max_failures=2, max_identical=3)
    assert policy.decide("a", "a is why", 1) == policy.decide("b", "b is why", 2) == Go()
    assert policy.decide("c", "c is why", 3) == End("failure 3 is more than max_failures=2 allows: c is why")
    assert isinstance(FailurePolicy(max_failures=0, max_identical=3).decide("a", "a is why", 1), End)
