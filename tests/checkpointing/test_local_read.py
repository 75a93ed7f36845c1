"""Reading memory of the node and files in place: what is verified, by whom, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from checkpointing.arena import map_slot
from checkpointing.holding import DigestMismatch, Holding, HoldingGone
from checkpointing.layout import Layout
from checkpointing.load import KeeperReads, Moved, load_state
from checkpointing.local_read import OpenHolding
from checkpointing.schema import Schema, TensorSpec, pieces
from checkpointing.transfer import Destination, Part, plan_transfer
from tests.checkpointing.node_keepers import Nodes, cut, random_reference

# 3 MiB in rows of a few KiB, so that a record is read in several blocks, and what has one row or no dim at all.
SCHEMA = Schema(
    (
        TensorSpec("tall", (701, 1123), "float32", 1, "all"),
        TensorSpec("flat", (1, 4099), "float64", 1, "all"),
        TensorSpec("cube", (5, 3, 7), "bfloat16", 2, "all"),
        TensorSpec("step", (), "int64", None, "all", fsdp_dims=()),
    ),
    1,
)
NBYTES = 701 * 1123 * 4 + 4099 * 8 + 105 * 2 + 8
REFERENCE = random_reference(SCHEMA, seed=5)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes("a")
    nodes.protect(SCHEMA, REFERENCE, Layout(), "a", step=2)
    yield nodes
    nodes.close()


def load(holdings: list[Holding], layout: Layout, rank: int) -> Moved:
    """One rank of ``layout`` on the node of the holdings, compared bit by bit."""
    held = pieces(SCHEMA, layout, rank)
    fetches = plan_transfer(SCHEMA, holdings, {rank: Destination("a", held)}).fetches[rank]
    into = {piece: np.empty(piece.size, REFERENCE[piece.name].dtype) for piece in held}
    moved = load_state(fetches, into, KeeperReads(lambda node, requests: pytest.fail("nothing is far")))
    for piece, array in into.items():
        assert array.tobytes() == cut(REFERENCE, piece).tobytes(), piece
    return moved


def flip(holding: Holding, record_name: str) -> None:
    """Turn over the last bit of a record in its arena."""
    record = next(record for record in holding.snapshot.records if record.piece.name == record_name)
    with open(f"/proc/{holding.locator.pid}/fd/{holding.locator.fds[holding.slot]}", "r+b") as memory:  # type: ignore[union-attr]
        header = memory.seek(0, 2) - holding.locator.nbytes  # type: ignore[union-attr]
        memory.seek(header + record.start + record.nbytes - 1)
        last = memory.read(1)[0]
        memory.seek(-1, 1)
        memory.write(bytes([last ^ 1]))


def test_one_reader_of_a_node_verifies_for_all(nodes: Nodes) -> None:
    holdings = nodes.inventory("a")
    layout = Layout(tp=4)
    assert load(holdings, layout, 0) == Moved(NBYTES, 0, 0)
    assert [load(holdings, layout, rank).read for rank in range(1, 4)] == [0, 0, 0]


def test_the_writer_reads_its_own_arena_where_it_has_it_mapped(nodes: Nodes) -> None:
    (holding,) = nodes.inventory("a")
    opened = OpenHolding.open(holding, nodes.arenas[0])
    assert np.shares_memory(opened.data, nodes.arenas[0].slot(holding.slot))
    piece = holding.snapshot.records[0].piece
    into = {piece: np.empty(piece.size, REFERENCE[piece.name].dtype)}
    wanted = [(piece, Part(holding, holding.snapshot.records[0], piece, True))]
    assert [opened.copy(wanted, into) for _ in range(2)] == [into[piece].nbytes, 0]
    assert into[piece].tobytes() == cut(REFERENCE, piece).tobytes()
    other = Nodes("a")
    other.protect(SCHEMA, REFERENCE, Layout(), "a", step=2)
    assert not np.shares_memory(OpenHolding.open(holding, other.arenas[0]).data, other.arenas[0].slot(0))
    other.close()


def test_a_reader_that_died_while_verifying_leaves_it_to_the_next(nodes: Nodes) -> None:
    (holding,) = nodes.inventory("a")
    _, marks = map_slot(holding.locator, holding.slot)  # type: ignore[arg-type]
    marks[: len(holding.snapshot.records)] = 1
    assert load([holding], Layout(), 0).read == NBYTES
    flip(holding, "tall")
    with pytest.raises(DigestMismatch, match=r"tall\[0:701, 0:1123\] is damaged in the primary of rank 0 on node a"):
        load([holding], Layout(), 0)


@pytest.mark.parametrize("name", ["tall", "flat", "cube", "step"])
def test_damage_is_found_by_whoever_comes_first(nodes: Nodes, name: str) -> None:
    (holding,) = nodes.inventory("a")
    flip(holding, name)
    for _ in range(2):
        with pytest.raises(DigestMismatch, match=f"{name}.* is damaged") as error:
            load([holding], Layout(tp=2), 0)
    assert error.value.key == holding.key


def test_what_was_verified_before_a_rewrite_is_not_trusted_after_it(nodes: Nodes) -> None:
    load(nodes.inventory("a"), Layout(), 0)
    nodes.protect(SCHEMA, REFERENCE, Layout(), "a", step=4)  # the same slot
    (holding,) = nodes.inventory("a")
    assert load([holding], Layout(), 0).read == NBYTES


def test_a_file_far_away_is_read_in_ranges(tmp_path: Path, nodes: Nodes) -> None:
    (holding,) = nodes.inventory("a")
    data, _ = map_slot(holding.locator, holding.slot)  # type: ignore[arg-type]
    path = tmp_path / "state"
    path.write_bytes(data.tobytes())
    far = replace(holding, tier="s3", locator=str(path), node="")
    near = replace(far, tier="disk")
    for layout in (Layout(), Layout(dp=3), Layout(tp=2)):
        for holding in (far, near):
            assert load([holding], layout, 0).read == NBYTES
    path.write_bytes(data.tobytes()[:-4096])
    for holding in (far, near):
        with pytest.raises((DigestMismatch, HoldingGone)):
            load([holding], Layout(), 0)
    path.unlink()
    for holding in (far, near):
        with pytest.raises(HoldingGone):
            load([holding], Layout(), 0)
