"""Decisions, as small pure functions and policies that return decision objects. No Ray, no clocks, no processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from checkpointing.layout import Layout
from workers.plan import Member


@dataclass(frozen=True)
class Go:
    """Carry on: recover from the incident, or keep training as it is."""


@dataclass(frozen=True)
class End:
    """End the job; ``reason`` is for the user."""

    reason: str


def divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def layouts_of_size(size: int) -> list[Layout]:
    """Every layout of exactly ``size`` workers without replicas (``auto`` shards instead of replicating)."""
    return [Layout(pp=pp, dp=size // pp // tp, tp=tp) for pp in divisors(size) for tp in divisors(size // pp)]


def choose_layout(
    preferred: Sequence[Layout] | None,
    num_workers: int,
    is_possible: Callable[[Layout], bool],
    bytes_moved: Callable[[Layout], int],
) -> Layout | None:
    """The layout for ``num_workers`` workers, or None when none fits.

    ``preferred`` is the job's list, first that fits wins; None is ``auto``: most workers used, then fewest bytes moved,
    then lowest tp, then lowest pp, ties by text.
    """
    if preferred is not None:
        return next((layout for layout in preferred if layout.size <= num_workers), None)
    for size in range(num_workers, 0, -1):
        possible = [layout for layout in layouts_of_size(size) if is_possible(layout)]
        if possible:
            return min(possible, key=lambda layout: (bytes_moved(layout), layout.tp, layout.pp, str(layout)))
    return None


def assign(
    layout: Layout, workers: Mapping[str, str], previous: tuple[Layout, tuple[Member, ...]] | None
) -> tuple[str, ...]:
    """Which worker plays each rank. ``workers`` maps worker id -> node, in placement order.

    Under an unchanged layout survivors keep their ranks and a vacancy goes to the dead worker's node first, so that
    almost nothing moves; otherwise ranks follow placement order, which keeps tensor-parallel peers on one node.
    """
    if previous is None or previous[0] != layout:
        return tuple(workers)[: layout.size]
    members = previous[1]
    taken = {member.worker for member in members}
    idle = [worker for worker in workers if worker not in taken]
    ranks = []
    for member in members:
        if member.worker in workers:
            ranks.append(member.worker)
            continue
        replacement = next((worker for worker in idle if workers[worker] == member.node), idle[0])
        idle.remove(replacement)
        ranks.append(replacement)
    return tuple(ranks)


@dataclass
class FailurePolicy:
    """Ends a job that cannot go on: too many failures, or the same one again and again without a step forward."""

    max_failures: int
    max_identical: int
    num_failures: int = 0
    _last: tuple[str, int] | None = None
    _repeats: int = field(default=0)

    def decide(self, kind: str, sentence: str, step: int) -> Go | End:
        """``kind`` is equal for equal failures, ``sentence`` says what happened; ``step`` is the last one made."""
        self.num_failures += 1
        again = self._last is not None and self._last[0] == kind and step <= self._last[1]
        self._repeats = self._repeats + 1 if again else 1
        if not again:
            self._last = (kind, step)
        if 0 <= self.max_failures < self.num_failures:
            return End(f"failure {self.num_failures} is more than max_failures={self.max_failures} allows: {sentence}")
        if self._repeats >= self.max_identical:
            return End(f"the same failure came {self._repeats} times in a row without a step forward: {sentence}")
        return Go()
