"""The memory tier under damage, old generations, rewriting and many threads."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from checkpointing.arena import Arena
from checkpointing.arenas import StaleGeneration
from checkpointing.cover import newest_complete
from checkpointing.holding import DigestMismatch, Holding, HoldingGone, ReadRequest
from checkpointing.keeper import Call, Keeper, Sending
from checkpointing.layout import Layout
from checkpointing.schema import Schema, TensorSpec, pieces
from checkpointing.snapshot import Snapshot, snapshot_nbytes, write_snapshot
from checkpointing.transfer import Destination, plan_transfer
from tests.checkpointing.node_keepers import TINY, Nodes, call_here, random_reference

LAYOUT = Layout.parse("dp2·tp2")
WHOLE = pieces(TINY, Layout(), 0)


@pytest.fixture
def nodes():
    made = Nodes("abcd")
    yield made
    made.close()


def flip(holding: Holding, index: int) -> str:
    """Flip one bit of the holding's ``index``-th record in shared memory; return the tensor's name."""
    record = holding.snapshot.records[index]
    record.data(Arena.attach(holding.locator).slot(holding.slot))[record.nbytes // 2] ^= 0x10
    return record.piece.name


@pytest.mark.parametrize("role", ["primary", "copy"])
@pytest.mark.parametrize("reader", ["same node", "another node"])
def test_a_flipped_bit_is_named_and_routed_around(nodes: Nodes, role: str, reader: str) -> None:
    reference = random_reference(TINY, 3)
    nodes.protect(TINY, reference, LAYOUT, "abcd")
    damaged = next(h for h in nodes.inventory("abcd") if h.role == role and h.node == "b")
    for index, record in enumerate(damaged.snapshot.records):
        name = flip(damaged, index)
        destination = Destination("b" if reader == "same node" else "elsewhere", (record.piece,))
        with pytest.raises(DigestMismatch) as error:
            nodes.load(plan_transfer(TINY, [damaged], {0: destination}), 0, destination, reference)
        for part in (name, "[", role, f"rank {damaged.snapshot.rank}", "node b"):
            assert part in str(error.value)
        assert error.value.key == damaged.key
        left = [h for h in nodes.inventory("abcd") if h.key != error.value.key]
        nodes.load(plan_transfer(TINY, left, {0: destination}), 0, destination, reference)
        flip(damaged, index)


def test_a_bit_flipped_on_the_way_is_found_by_the_receiver(nodes: Nodes) -> None:
    reference = random_reference(TINY, 3)
    nodes.protect(TINY, reference, LAYOUT, "abcd")
    destination = Destination("elsewhere", WHOLE)
    plan = plan_transfer(TINY, nodes.inventory("abcd"), {0: destination})
    honest = nodes.read

    def read(node: str, requests: list[ReadRequest]):
        data, digests = honest(node, requests)
        data[len(data) // 2] ^= 1
        return data, digests

    nodes.read = read
    with pytest.raises(DigestMismatch, match=r"\[.*\] was damaged on its way from the"):
        nodes.load(plan, 0, destination, reference)


def test_a_copy_that_arrives_damaged_is_refused_and_not_listed() -> None:
    def tear(calls: Sequence[Call]) -> list[None]:
        ((keeper, method, (snapshot, part, slot, data, may_replace)),) = calls
        torn = data.copy()
        torn[0] ^= 1
        return [getattr(keeper, method)(snapshot, part, slot, torn, may_replace)]

    buddy = Keeper("buddy", tear)
    keeper = Keeper("node", tear)
    with pytest.raises(DigestMismatch, match="copy of rank 0 sent to node buddy"):
        protect_once(keeper, 1, 1, buddy)
    assert buddy.inventory() == []
    assert [h.role for h in keeper.inventory()] == ["primary"]


def protect_once(
    keeper: Keeper,
    generation: int,
    step: int,
    buddy: Keeper | None = None,
    durable: bool = False,
    spared: tuple[int, int] | None = None,
) -> Arena:
    reference = random_reference(TINY, step)
    state = {piece: reference[piece.name] for piece in WHOLE}
    sendings = [to(buddy)] if buddy else []
    address, _ = keeper.open_arena(generation, 0, snapshot_nbytes(state), sendings, None, spared)
    arena = Arena.attach(address)
    with arena.writing(step % 2) as buffer:
        records = write_snapshot(buffer, state)
    keeper.protect(Snapshot(generation, step, 0, "1", records, {}), step % 2, durable)
    return arena


def to(buddy: Keeper) -> Sending:
    """All that ``protect_once`` writes."""
    return Sending((buddy,), len(WHOLE), None, 0, {})


def test_an_old_generation_can_neither_open_nor_protect_nor_hold() -> None:
    keeper = Keeper("node", call_here)
    protect_once(keeper, generation=3, step=1)
    snapshot = keeper.inventory()[0].snapshot
    keeper.fence(4)
    keeper.fence(2)  # never backwards
    for call in (
        lambda: keeper.open_arena(3, 1, 64),
        lambda: keeper.protect(snapshot, 1),
        lambda: keeper.hold(snapshot, 0, 1, np.zeros(snapshot.nbytes, np.uint8), False),
    ):
        with pytest.raises(StaleGeneration, match="is at generation 4 and refuses generation 3"):
            call()
    assert len(keeper.inventory()) == 1, "what was held stays until it is released"
    protect_once(keeper, generation=4, step=2)
    keeper.release(before_generation=4)
    assert [h.snapshot.generation for h in keeper.inventory()] == [4]
    keeper.release(before_generation=5)


def test_the_process_that_wrote_an_arena_goes_on_in_it_and_spares_the_slot_that_others_read() -> None:
    buddy = Keeper("buddy", call_here)
    keeper = Keeper("node", call_here)
    for step in (4, 5):
        first = protect_once(keeper, 1, step, buddy)
    source = {holding.role: holding for holding in keeper.inventory() + buddy.inventory() if holding.snapshot.step == 5}
    keeper.fence(2)
    buddy.fence(2)
    snapshot = source["primary"].snapshot
    address, slot = keeper.open_arena(2, 0, first.address.nbytes, [to(buddy)], first.address, (1, 5))
    assert (address, slot) == (first.address, 0), "step 5 of generation 1 lies in slot 1"
    with first.writing(slot) as buffer:
        buffer[:] = first.slot(1)
    keeper.protect(replace(snapshot, generation=2), slot)
    for owner in (keeper, buddy):
        held = {(h.snapshot.generation, h.snapshot.step, h.slot) for h in owner.inventory()}
        assert held == {(1, 5, 1), (2, 5, 0)}, "the source is still there, the step before it has made room"
        assert len({h.locator for h in owner.inventory()}) == 1, "in one arena"
        owner.release(2)
        assert [h.snapshot.generation for h in owner.inventory()] == [2]
        request = ReadRequest(owner.inventory()[0].key, snapshot.records[0], snapshot.records[0].piece)
        assert owner.read([request])[1] == (snapshot.records[0].digest,)


def test_another_process_and_a_source_that_is_held_once_get_an_arena_of_their_own() -> None:
    keeper = Keeper("node", call_here)
    first = protect_once(keeper, 1, 5)
    nbytes = first.address.nbytes
    assert keeper.open_arena(4, 0, nbytes, (), first.address, None)[0] != first.address
    assert keeper.open_arena(2, 0, nbytes)[0] != first.address
    assert keeper.open_arena(3, 0, nbytes + 64, (), first.address, (1, 5))[0] != first.address


def test_a_copy_that_comes_too_late_cannot_touch_the_arena_of_a_later_generation() -> None:
    buddy = Keeper("buddy", call_here)
    keeper = Keeper("node", call_here)
    arena = protect_once(keeper, 1, 4, buddy)
    late = keeper.inventory()[0].snapshot
    protect_once(keeper, 2, 6, buddy, spared=(1, 5))
    before = {h.snapshot.step for h in buddy.inventory()}
    buddy.fence(2)
    with pytest.raises(StaleGeneration):
        buddy.hold(late, 0, 0, arena.slot(0)[: late.nbytes], True)
    assert {h.snapshot.step for h in buddy.inventory()} == before == {6}


def test_a_generation_fenced_while_its_copy_arrives_is_not_listed() -> None:
    source, buddy = Keeper("node", call_here), Keeper("buddy", call_here)
    arena = protect_once(source, 1, 1)
    snapshot = source.inventory()[0].snapshot

    data = arena.slot(1)[: snapshot.nbytes]
    original = buddy._arenas.open

    def open_then_fence(*args):
        kept = original(*args)
        buddy.fence(2)
        return kept

    buddy._arenas.open = open_then_fence
    with pytest.raises(StaleGeneration):
        buddy.hold(snapshot, 0, 1, data, False)
    assert buddy.inventory() == []


def test_a_slot_that_is_rewritten_is_not_listed_and_not_served() -> None:
    keeper = Keeper("node", call_here)
    protect_once(keeper, 1, 1)
    arena = protect_once(keeper, 1, 2)
    old = next(h for h in keeper.inventory() if h.snapshot.step == 1)
    record = old.snapshot.records[0]
    with arena.writing(1):
        assert [h.snapshot.step for h in keeper.inventory()] == [2]
        with pytest.raises(HoldingGone, match="node node no longer has the primary of rank 0 at step 1") as error:
            keeper.read([ReadRequest(old.key, record, record.piece)])
    again = pickle.loads(pickle.dumps(error.value))
    assert (str(again), again.key) == (str(error.value), old.key)
    protect_once(keeper, 1, 3)
    assert [h.snapshot.step for h in keeper.inventory()] == [2, 3]
    keeper.release(2)


def test_pins_outlive_the_slots_and_only_the_newest_stays() -> None:
    keeper = Keeper("node", call_here)
    for step in range(1, 5):
        protect_once(keeper, 1, step, durable=step in (1, 2))
    assert [(h.role, h.snapshot.step) for h in keeper.inventory()] == [("pin", 2), ("primary", 4), ("primary", 3)]
    keeper.release(2)


def test_readers_and_writers_in_many_threads_only_ever_see_whole_snapshots() -> None:
    """Four workers snapshot as fast as they can while readers take whatever is listed."""
    schema = Schema((TensorSpec("w", (64, 64), "int64", None, "first"),), 1)
    nodes = Nodes("ab")
    layout, stop = Layout.parse("dp4"), threading.Event()
    served = []

    def train() -> None:
        for step in range(1, 6):
            reference = {"w": np.full((64, 64), step)}
            nodes.protect(schema, reference, layout, "abab", step=step)
        stop.set()

    def read() -> None:
        while not stop.is_set():
            for holding in nodes.inventory("ab"):
                record = holding.snapshot.records[0]
                try:
                    data, _ = nodes.read(holding.node, [ReadRequest(holding.key, record, record.piece)])
                except HoldingGone:
                    continue
                served.append((holding.snapshot.step, set(data.view(np.int64).tolist())))

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(job) for job in (train, read, read)]
        for job in running:
            job.result()
    assert served and all(values == {step} for step, values in served)
    assert newest_complete(schema, nodes.inventory("ab")) == (1, 5)
    nodes.close()
