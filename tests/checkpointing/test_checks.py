"""Every way in which the holdings of a step can be wrong is found and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from checkpointing.arena import ArenaAddress
from checkpointing.boxes import volume
from checkpointing.checks import violations
from checkpointing.cover import StateLost
from checkpointing.holding import Holding
from checkpointing.layout import Layout
from checkpointing.schema import Piece, Schema, ShardMap, TensorSpec
from checkpointing.snapshot import Record, Snapshot
from checkpointing.transfer import Destination, plan_transfer

SCHEMA = Schema(
    (
        TensorSpec("w", (8, 6), "float32", 1, "layer", 0),
        TensorSpec("b", (6,), "bfloat16", None, "layer", 0),
        TensorSpec("step", (), "int64", None, "all"),
    ),
    1,
)
ITEMSIZE = {"float32": 4, "uint16": 2, "int64": 8}


def holdings(layout: str) -> list[Holding]:
    shards, found = ShardMap(SCHEMA, Layout.parse(layout)), []
    stored = {spec.name: spec.stored_as for spec in SCHEMA.tensors}
    for rank in range(shards.layout.size):
        records = tuple(
            Record(piece, stored[piece.name], 0, volume(piece) * ITEMSIZE[stored[piece.name]], f"digest of {piece}")
            for piece in shards.pieces(rank)
        )
        snapshot = Snapshot(1, 7, rank, layout, records, {})
        found.append(Holding(snapshot, 0, f"n{rank}", "primary", "memory", ArenaAddress(0, (), 0, "")))
    return found


def changed(
    held: Sequence[Holding], rank: int, change: Callable[[tuple[Record, ...]], Sequence[Record]]
) -> list[Holding]:
    new = replace(held[rank].snapshot, records=tuple(change(held[rank].snapshot.records)))
    return [*held[:rank], replace(held[rank], snapshot=new), *held[rank + 1 :]]


def test_a_whole_state_has_none_also_of_groups_that_cut_differently() -> None:
    assert violations(SCHEMA, holdings("r2·dp2·tp2")) == ()
    assert violations(SCHEMA, holdings("dp2·tp2") + holdings("dp3")) == ()


@pytest.mark.parametrize(
    ("rank", "change", "kind", "sentence"),
    [
        (1, lambda r: r[1:], "missing", "w[0:4, 3:6] is held by nobody"),
        (0, lambda r: [*r, r[0]], "overlap", "w[0:4, 0:3] is there twice (primary of rank 0 on node n0)"),
        (
            0,
            lambda r: [replace(r[0], piece=Piece("w", (0, 0), (4, 4)), nbytes=64), *r[1:]],
            "overlap",
            "w[0:4, 0:4] overlaps w[0:4, 3:6] of the same layout "
            "(primary of rank 0 on node n0 against primary of rank 1 on node n1)",
        ),
        (
            2,
            lambda r: [replace(r[0], piece=Piece("w", (4, 0), (5, 3)), nbytes=60), *r[1:]],
            "shape",
            "w[4:9, 0:3] is outside its tensor's shape [8, 6] (primary of rank 2 on node n2)",
        ),
        (
            3,
            lambda r: [replace(r[0], dtype="float64", nbytes=96), *r[1:]],
            "dtype",
            "w[4:8, 3:6] has dtype float64 and 96 bytes instead of dtype float32 (primary of rank 3 on node n3)",
        ),
        (
            1,
            lambda r: [*r[:1], replace(r[1], digest="another"), *r[2:]],
            "digest",
            "b[0:3] differs among its holders: primary of rank 0 on node n0 against primary of rank 1 on node n1",
        ),
    ],
)
def test_each_is_named(rank: int, change: Callable, kind: str, sentence: str) -> None:
    held = changed(holdings("dp2·tp2"), rank, change)
    found = {str(violation): violation for violation in violations(SCHEMA, held)}
    assert sentence in found
    violation = found[sentence]
    assert violation.kind == kind and violation.box.name in ("w", "b")
    assert (held[rank] in violation.holders) == (kind != "missing")
    others = {v.kind for v in found.values()} - {kind}
    assert others <= {"missing"}, "what is outside of its tensor leaves a gap in it"


def test_an_overlap_names_holders_of_each_box() -> None:
    """Many replicas hold the good box; the culprit comes last."""
    held = changed(
        holdings("r6·dp2"), 11, lambda r: [replace(r[0], piece=Piece("w", (3, 0), (5, 6)), nbytes=120), *r[1:]]
    )
    (sentence,) = [str(v) for v in violations(SCHEMA, held) if v.kind == "overlap" and "w[0:4" in str(v)]
    assert (
        "primary of rank 0 on node n0" in sentence and "and 2 more against primary of rank 11 on node n11" in sentence
    )


def test_boxes_of_a_volume_that_is_right_do_not_hide_a_gap() -> None:
    """Two ranks hold the same half: the number of elements is that of the tensor."""
    held = holdings("dp2")
    same = [record for record in held[0].snapshot.records if record.piece.name == "w"]
    held = changed(held, 1, lambda records: [*same, *records[1:]])
    assert {(v.kind, str(v)) for v in violations(SCHEMA, held)} == {("missing", "w[4:8, 0:6] is held by nobody")}


def test_a_volume_that_is_right_does_not_hide_an_overlap_and_a_gap() -> None:
    held = holdings("dp2")
    held = changed(held, 1, lambda r: [replace(r[0], piece=Piece("w", (3, 0), (4, 6))), *r[1:]])
    assert sorted(v.kind for v in violations(SCHEMA, held)) == ["missing", "overlap"]
    with pytest.raises(StateLost, match=r"nobody holds w\[7:8, 0:6\]$"):
        plan_transfer(SCHEMA, held, {0: Destination("new", (Piece("w", (0, 0), (8, 6)),))})
