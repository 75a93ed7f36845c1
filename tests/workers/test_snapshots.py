"""Snapshots are copied beside the next step: training waits before the vote, and a generation's end loses no copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from checkpointing.holding import ReadRequest
from checkpointing.keeper import Keeper
from checkpointing.layout import Layout
from checkpointing.schema import Piece
from workers import snapshots
from workers.fence import Fence
from workers.host_state import HostState
from workers.plan import Order
from workers.snapshots import MappedArena, Snapshots

_PIECE = Piece("w", (0,), (1000,))


class _Device:
    """A state whose way to the host takes until ``arrived`` is set."""

    def __init__(self) -> None:
        self.arrays = {_PIECE: np.zeros(1000, np.float32)}
        self.arrived = threading.Event()

    def pull(self, pieces: Iterable[Piece]) -> None:
        assert self.arrived.wait(30)


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Keeper:
    def refuse(*call: Any) -> None:
        raise AssertionError("nothing is sent on")

    monkeypatch.setattr(snapshots, "wait_for", lambda done, fence: done)
    return Keeper("node", refuse)


def _snapshots(keeper: Keeper, state: _Device) -> Snapshots:
    def remote(method: Callable[..., Any]) -> SimpleNamespace:
        return SimpleNamespace(remote=method)

    handle = SimpleNamespace(open_arena=remote(keeper.open_arena), protect=remote(keeper.protect))
    order = SimpleNamespace(
        generation=1,
        rank=0,
        step=0,
        layout=Layout(),
        keeper=handle,
        keepers={},
        written=(_PIECE,),
        sends=(),
        spared=None,
    )
    return Snapshots(cast(Order, order), cast(HostState, state), Fence(), MappedArena())


def _held(keeper: Keeper) -> dict[int, float]:
    """Step -> the value that its snapshot has everywhere, verified."""
    found = {}
    for holding in keeper.inventory():
        (record,) = holding.snapshot.records
        data, _ = keeper.read([ReadRequest(holding.key, record, record.piece)])
        values = np.unique(data.view(np.float32))
        assert len(values) == 1
        found[holding.snapshot.step] = float(values[0])
    return found


def test_training_goes_on_while_a_snapshot_is_copied_and_waits_for_it_before_the_vote(keeper: Keeper) -> None:
    state = _Device()
    taking = _snapshots(keeper, state)
    for step in range(1, 4):
        state.arrived.clear()
        taking.take(step, {}, durable=False)  # returns, although nothing can have been copied
        assert step not in _held(keeper)
        threading.Timer(0.05, state.arrived.set).start()
        assert taking.wait_held() > 0 and taking.cost_s > 0
        assert _held(keeper)[step] == step - 1
        state.arrays[_PIECE] += 1  # the optimizer may move now
    assert _held(keeper) == {2: 1.0, 3: 2.0}
    taking.close()


def test_a_generation_that_ends_lets_the_copy_come_to_its_end(keeper: Keeper) -> None:
    state = _Device()
    taking = _snapshots(keeper, state)
    taking.take(1, {}, durable=False)
    threading.Timer(0.05, state.arrived.set).start()
    taking.close()
    state.arrays[_PIECE] += 1
    assert _held(keeper) == {1: 0.0}
