"""Transfers through real keepers, after losing nodes, against element masks and an unsharded reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpointing.cover import StateLost, may_replace_others, newest_complete
from checkpointing.layout import Layout
from checkpointing.schema import Schema, TensorSpec, pieces
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


def test_a_state_held_once_does_not_replace_one_held_twice():
    """The newest snapshot is listed before its copies are there; until then the one before it is the safer one."""
    nodes, layout, domains = Nodes("ab"), Layout.parse("dp2"), {"a": "x", "b": "y"}
    nodes.protect(TINY, random_reference(TINY, 4), layout, "ab", step=4)
    alone = Nodes("ab", copies=False)
    alone.protect(TINY, random_reference(TINY, 5), layout, "ab", step=5)
    both = nodes.inventory("ab") + alone.inventory("ab")
    assert newest_complete(TINY, both) == (1, 5)
    assert not may_replace_others(TINY, both, (1, 5), domains)
    assert may_replace_others(TINY, both, (1, 4), domains)
    assert may_replace_others(TINY, both, (1, 5), {"a": "x", "b": "x"}), "one domain: neither survives its loss"
    left = nodes.inventory("a") + alone.inventory("ab")
    assert may_replace_others(TINY, left, (1, 5), domains), "nothing is held twice any more"
    nodes.close()
    alone.close()


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
