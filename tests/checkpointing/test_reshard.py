"""Any layout to any layout, after any loss, against element masks and an unsharded reference."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpointing.arena import ArenaAddress
from checkpointing.boxes import volume
from checkpointing.cover import StateLost, newest_complete
from checkpointing.holding import Holding
from checkpointing.layout import Layout
from checkpointing.schema import Schema, TensorSpec, pieces
from checkpointing.snapshot import Record, Snapshot
from checkpointing.transfer import Destination, plan_transfer
from tests.checkpointing.node_keepers import TINY, Nodes, cut, random_reference

SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 11])
LAYOUTS = st.builds(Layout, *(st.integers(1, 3) for _ in range(4))).filter(lambda layout: layout.size <= 12)
LIMITS = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    num_layers = draw(st.integers(1, 4))
    tensors = []
    for index in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(SIZES, max_size=3)))
        where = draw(st.sampled_from(["layer", "first", "last", "all"]))
        tensors.append(
            TensorSpec(
                name=draw(st.sampled_from(["", "exp_avg/"])) + f"t{index}",
                shape=shape,
                dtype=draw(st.sampled_from(["float32", "bfloat16", "int64", "uint8"])),
                tp_dim=draw(st.sampled_from([None, *range(len(shape))])),
                where=where,
                layer=draw(st.integers(0, num_layers - 1)) if where == "layer" else None,
                fsdp_dims=draw(st.sampled_from([(0,), ()])) if shape else (),
            )
        )
    return Schema(tuple(tensors), num_layers)


def mask_of(reference, boxes):
    """Per tensor, how often each element is in ``boxes``."""
    masks = {name: np.zeros(array.shape, np.int32) for name, array in reference.items()}
    for box in boxes:
        cut(masks, box)[...] += 1
    return masks


@LIMITS
@given(schemas(), LAYOUTS, LAYOUTS, st.data())
def test_any_layout_after_any_loss_is_bitwise_equal_or_named_as_lost(schema, before, after, data):
    names = [f"n{i}" for i in range(data.draw(st.integers(1, 5), label="num_nodes"))]
    reference = random_reference(schema, seed=before.size)
    nodes = Nodes(names, copies=data.draw(st.booleans(), label="copies"))
    placement = [data.draw(st.sampled_from(names)) for _ in range(before.size)]
    nodes.protect(schema, reference, before, placement)
    dead = data.draw(st.lists(st.sampled_from(names), max_size=2, unique=True), label="dead")
    alive = [name for name in names if name not in dead]
    holdings = nodes.inventory(alive)

    survives = mask_of(reference, [box for node, box in nodes.held if node in alive])
    lost = {name for name, mask in survives.items() if (mask == 0).any()}
    if lost or not holdings:
        with pytest.raises(StateLost) as error:
            newest_complete(schema, holdings)
        assert {box.name for box in error.value.missing} == (lost if holdings else set())
        assert not lost or not holdings or any(name in str(error.value) for name in lost)
        nodes.close()
        return
    assert newest_complete(schema, holdings) == (1, 1)

    destinations = {
        rank: Destination(data.draw(st.sampled_from([*alive, "newcomer"])), pieces(schema, after, rank))
        for rank in range(after.size)
    }
    plan = plan_transfer(schema, holdings, destinations)
    assert plan == plan_transfer(schema, holdings[::-1], destinations)
    needed = 0
    for rank, destination in destinations.items():
        near = mask_of(reference, [box for node, box in nodes.held if node in alive and node == destination.node])
        for fetch in plan.fetches[rank]:
            array = reference[fetch.piece.name]
            needed += int((cut(near, fetch.piece) == 0).sum()) * array.itemsize
            once = np.zeros(array.shape, np.int32)
            for part in fetch.parts:
                cut({fetch.piece.name: once}, part.box)[...] += 1
            assert (cut({fetch.piece.name: once}, fetch.piece) == 1).all()
            assert once.sum() == cut(reference, fetch.piece).size
        nodes.load(plan, rank, destination, reference)
    assert plan.bytes_moved == plan.bytes_lower_bound == needed
    assert plan.tier == "memory"
    nodes.close()


@LIMITS
@given(schemas(), LAYOUTS, st.integers(1, 4))
def test_nothing_moves_when_layout_and_placement_stay(schema, layout, num_nodes):
    names = [f"n{i}" for i in range(num_nodes)]
    placement = [names[rank % num_nodes] for rank in range(layout.size)]
    nodes = Nodes(names)
    nodes.protect(schema, random_reference(schema, 0), layout, placement)
    destinations = {rank: Destination(node, pieces(schema, layout, rank)) for rank, node in enumerate(placement)}
    plan = plan_transfer(schema, nodes.inventory(names), destinations)
    assert plan.bytes_moved == plan.bytes_lower_bound == 0
    nodes.close()


@LIMITS
@given(schemas(), LAYOUTS)
def test_pieces_of_a_layout_cover_every_element_once_per_replica(schema, layout):
    masks = mask_of(
        {spec.name: np.zeros(spec.shape) for spec in schema.tensors},
        [piece for rank in range(layout.size) for piece in pieces(schema, layout, rank)],
    )
    for spec in schema.tensors:
        replicas = layout.r * (layout.pp if spec.where == "all" else 1)
        replicas *= layout.tp if spec.tp_dim is None else 1
        replicas *= 1 if spec.fsdp_dims and spec.shape else layout.dp
        assert (masks[spec.name] == replicas).all()


def test_the_newest_whole_step_is_taken_and_a_torn_one_passed_over():
    nodes, reference = Nodes("abcd"), random_reference(TINY, 1)
    layout = Layout.parse("dp2·tp2")
    nodes.protect(TINY, reference, layout, "abcd", generation=1, step=4)
    nodes.protect(TINY, reference, layout, "abcd", generation=1, step=5)
    assert newest_complete(TINY, nodes.inventory("abcd")) == (1, 5)
    nodes.protect(TINY, reference, layout, "abcd", generation=2, step=5)
    assert newest_complete(TINY, nodes.inventory("abcd")) == (2, 5)
    with nodes.arenas[0].writing(1):  # rank 0 of generation 2 is rewriting its slot
        partial = [h for h in nodes.inventory("acd") if (h.snapshot.generation, h.role) != (2, "copy")]
        assert newest_complete(TINY, partial) == (1, 5)
    nodes.close()


def test_the_sentence_names_tensors_boxes_and_step():
    nodes = Nodes("ab", copies=False)
    nodes.protect(TINY, random_reference(TINY, 1), Layout.parse("dp2"), "ab", step=7)
    with pytest.raises(StateLost, match=r"step 7 is lost: nobody holds embed\.weight\[7:13, 0:6\], .* and 6 more"):
        newest_complete(TINY, nodes.inventory("a"))
    with pytest.raises(StateLost, match="no snapshot of any step is left"):
        newest_complete(TINY, [])
    nodes.close()


def test_sources_share_the_load():
    schema = Schema(tuple(TensorSpec(f"w{i}", (8, 8), "float32", None, "first", fsdp_dims=()) for i in range(9)), 1)
    nodes = Nodes("abc", copies=False)
    nodes.protect(schema, random_reference(schema, 1), Layout.parse("r3"), "abc")
    plan = plan_transfer(schema, nodes.inventory("abc"), {0: Destination("new", pieces(schema, Layout(), 0))})
    served = [part.holding.node for fetch in plan.fetches[0] for part in fetch.parts]
    assert sorted(served) == list("aaabbbccc")
    nodes.close()


def test_a_large_plan_takes_seconds_not_minutes():
    """512 ranks with copies to 448 ranks; a join of all pairs would take hours."""
    tensors = [
        TensorSpec(f"layers.{i}.w{j}", (4096, 4096), "float32", j, "layer", i) for i in range(32) for j in range(2)
    ]
    schema = Schema(tuple(tensors), 32)
    before, after = Layout.parse("pp4·dp16·tp8"), Layout.parse("pp4·dp14·tp8")
    holdings = []
    for rank in range(before.size):
        records = tuple(Record(piece, "float32", 0, 4 * volume(piece), "") for piece in pieces(schema, before, rank))
        snapshot = Snapshot(1, 1, rank, str(before), records, {})
        for node, role in ((rank // 8, "primary"), ((rank // 8 + 1) % 64, "copy")):
            holdings.append(Holding(snapshot, 0, f"n{node}", role, "memory", ArenaAddress(0, (), 0, "")))
    destinations = {rank: Destination(f"n{rank // 8}", pieces(schema, after, rank)) for rank in range(after.size)}
    begun = time.process_time()
    assert newest_complete(schema, holdings) == (1, 1)
    plan = plan_transfer(schema, holdings, destinations)
    seconds = time.process_time() - begun
    assert plan.bytes_moved == plan.bytes_lower_bound > 0
    assert seconds < 10
