"""From what survives to the next plan, without a process: who plays, and that no more moves than must."""

from __future__ import annotations

import pytest

from checkpointing.arena import ArenaAddress
from checkpointing.boxes import volume
from checkpointing.config import ProtectionConfig
from checkpointing.holding import Holding
from checkpointing.layout import Layout
from checkpointing.schema import Schema, TensorSpec, pieces
from checkpointing.snapshot import Record, Snapshot
from orchestrator.recovery import NextGeneration, Source, plan_generation
from workers.plan import Plan

NUM_LAYERS = 4
SCHEMA = Schema(
    tuple(TensorSpec(f"layers.{layer}.weight", (12, 8), "float32", 0, "layer", layer) for layer in range(NUM_LAYERS)),
    NUM_LAYERS,
)
STATE_BYTES = NUM_LAYERS * 12 * 8 * 4


def workers(num_nodes: int, each: int = 2, lost: tuple[str, ...] = ()) -> dict[str, str]:
    names = [f"n{index}" for index in range(num_nodes)]
    return {f"{node}/{index}": node for node in names if node not in lost for index in range(each)}


def holdings(upcoming: NextGeneration, step: int, lost: tuple[str, ...] = ()) -> list[Holding]:
    """What the keepers hold after ``step`` of this generation when the nodes ``lost`` are gone."""
    plan, found = upcoming.plan, []
    for rank, member in enumerate(plan.members):
        records, start = [], 0
        for piece in upcoming.protected.written[rank]:
            records.append(Record(piece, "float32", start, volume(piece) * 4, "digest"))
            start += volume(piece) * 4
        meta = {"cursor": [0, step, 0], "tokens": 100 * step}
        copies = [
            (node, "copy", [record for record in records if record.piece in send.pieces])
            for send in upcoming.protected.sends[rank]
            for node in send.nodes
        ]
        for node, role, held in ((member.node, "primary", records), *copies):
            snapshot = Snapshot(plan.generation, step, rank, str(plan.layout), tuple(held), meta)
            if node not in lost:
                found.append(Holding(snapshot, step % 2, node, role, "memory", ArenaAddress(0, (), 0, "")))
    return found


def plan_on(
    names: dict[str, str],
    source: Source | None = None,
    previous: Plan | None = None,
    preferred: str | None = None,
    survive: int = 1,
    domains: dict[str, str] | None = None,
) -> NextGeneration | None:
    return plan_generation(
        generation=previous.generation + 1 if previous else 1,
        schema=SCHEMA,
        source=source or Source.fresh(),
        preferred=tuple(Layout.parse(text) for text in preferred.split()) if preferred else None,
        is_possible=lambda layout: 12 % layout.tp == 0 and layout.pp <= NUM_LAYERS,
        workers=names,
        domains=domains or {node: node for node in names.values()},
        protection=ProtectionConfig(survive=survive),
        memory={},
        previous=previous,
    )


def test_the_first_plan_moves_nothing_and_protects_everyone() -> None:
    first = plan_on(workers(4), preferred="dp2·tp2·pp2")
    assert first is not None and first.transfer is None and first.source.tier == "init"
    assert first.plan.survives == 1 and first.plan.spares == ()
    assert all(member.buddies and member.node not in member.buddies for member in first.plan.members)
    # Tensor-parallel peers (neighbours in rank) sit on one node.
    nodes = [member.node for member in first.plan.members]
    assert nodes[::2] == nodes[1::2]


def test_with_one_node_or_without_protection_nothing_is_survived_and_the_plan_says_so() -> None:
    alone = plan_on(workers(1), preferred="dp2")
    unprotected = plan_on(workers(4), preferred="dp2·tp2·pp2", survive=0)
    for upcoming in (alone, unprotected):
        assert upcoming is not None and upcoming.plan.survives == 0
        assert {member.buddies for member in upcoming.plan.members} == {()}


def test_replicas_on_other_nodes_need_no_copy_and_replicas_on_the_same_node_do() -> None:
    spread = plan_on(workers(4), preferred="r2·dp4", survive=0)
    together = plan_on(workers(4), preferred="r2")
    assert spread is not None and spread.plan.survives == 1 and not any(spread.protected.sends)
    assert together is not None and together.plan.survives == 1
    sent = [piece for sends in together.protected.sends for send in sends for piece in send.pieces]
    assert len(sent) == NUM_LAYERS and all(together.protected.sends), "each sends a part, once"


def test_too_few_workers_for_any_layout_is_no_plan() -> None:
    assert plan_on(workers(1), preferred="dp4 dp3") is None


@pytest.mark.parametrize("lost", ["n0", "n1", "n2", "n3"])
@pytest.mark.parametrize("preferred", ["dp2·tp2·pp2 dp3·pp2", "r2·dp4 tp2·pp2", None])
def test_after_any_lost_node_the_state_comes_from_memory_and_no_byte_moves_twice(
    lost: str, preferred: str | None
) -> None:
    first = plan_on(workers(4), preferred=preferred)
    assert first is not None
    source = Source.of(holdings(first, step=7, lost=(lost,)), "memory")
    assert (source.step, source.cursor, source.tokens, source.generation) == (7, [0, 7, 0], 700, 1)
    upcoming = plan_on(workers(4, lost=(lost,)), source, first.plan, preferred)
    assert upcoming is not None and upcoming.transfer is not None
    plan, transfer = upcoming.plan, upcoming.transfer
    assert plan.step == 7 and plan.generation == 2 and plan.survives == 1
    assert lost not in {node for member in plan.members for node in (member.node, *member.buddies)}
    assert transfer.tier == "memory" and transfer.bytes_moved == transfer.bytes_lower_bound
    for rank, member in enumerate(plan.members):
        fetched = transfer.fetches[rank]
        assert sorted(fetch.piece for fetch in fetched) == sorted(pieces(SCHEMA, plan.layout, rank))
        for fetch in fetched:
            assert sum(volume(part.box) for part in fetch.parts) == volume(fetch.piece)
            assert all(part.holding.node != lost for part in fetch.parts)
            assert all(part.local == (part.holding.node == member.node) for part in fetch.parts)
    assert len(plan.members) + len(plan.spares) == 6


def test_a_standby_on_the_dead_workers_node_moves_nothing() -> None:
    """Its node's keeper still has the state."""
    layout = "dp2·tp2·pp2"
    first = plan_on(workers(4), preferred=layout)
    assert first is not None
    names = {name: node for name, node in workers(4).items() if name != "n2/0"} | {"n2/2": "n2"}
    upcoming = plan_on(names, Source.of(holdings(first, 3), "memory"), first.plan, layout)
    assert upcoming is not None and upcoming.transfer is not None
    assert upcoming.transfer.bytes_moved == 0
    changed = [new.worker for old, new in zip(first.plan.members, upcoming.plan.members, strict=True) if old != new]
    assert changed == ["n2/2"]


def test_workers_that_no_layout_can_use_are_spares() -> None:
    upcoming = plan_on(workers(4), preferred="dp3·pp2")
    assert upcoming is not None
    assert upcoming.plan.spares == ("n3/0", "n3/1")


def test_auto_prefers_the_layout_that_moves_least() -> None:
    """Of all layouts of six workers; ties as `choose_layout` has them."""
    first = plan_on(workers(4))
    assert first is not None and first.plan.layout.size == 8
    source = Source.of(holdings(first, 5, lost=("n3",)), "memory")
    chosen = plan_on(workers(3), source, first.plan)
    assert chosen is not None and chosen.transfer is not None and chosen.plan.layout.size == 6
    for text in ("dp6", "dp3·pp2", "dp2·pp3", "dp3·tp2", "dp2·tp3", "tp6", "pp3·tp2"):
        other = plan_on(workers(3), source, first.plan, text)
        assert other is not None and other.transfer is not None
        assert chosen.transfer.bytes_moved <= other.transfer.bytes_moved <= STATE_BYTES * 6


def test_survivors_go_on_from_what_they_wrote_themselves() -> None:
    """Both workers of a node hold the whole state, and so does every other node."""
    first = plan_on(workers(4), preferred="r8")
    assert first is not None
    upcoming = plan_on(workers(4), Source.of(holdings(first, 3), "memory"), first.plan, "r8")
    assert upcoming is not None and upcoming.transfer is not None
    for rank, fetches in upcoming.transfer.fetches.items():
        for fetch in fetches:
            (part,) = fetch.parts
            assert (part.holding.snapshot.rank == rank) == (fetch.piece in first.protected.written[rank])
    assert upcoming.transfer.bytes_moved == 0, "what another worker of the node wrote is as near"


def test_bytes_come_from_the_own_failure_domain_first() -> None:
    """n0 and n2 are one domain, n1 and n3 the other; n2 and n3 are new and each domain has the whole state."""
    domains = {"n0": "even", "n1": "odd", "n2": "even", "n3": "odd"}
    first = plan_on(workers(2), preferred="r4", domains=domains)
    assert first is not None
    upcoming = plan_on(workers(4), Source.of(holdings(first, 3), "memory"), first.plan, "r8", domains=domains)
    assert upcoming is not None and upcoming.transfer is not None
    for rank, fetches in upcoming.transfer.fetches.items():
        served = {part.holding.node for fetch in fetches for part in fetch.parts}
        assert {domains[node] for node in served} == {domains[upcoming.plan.members[rank].node]}
    assert upcoming.transfer.bytes_moved == 4 * STATE_BYTES
