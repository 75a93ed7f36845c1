"""From what survives to the next plan: which state, which layout, who plays which rank, and what moves where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from checkpointing.boxes import volume
from checkpointing.config import ProtectionConfig
from checkpointing.holding import HoldingKey
from checkpointing.layout import Layout
from checkpointing.placement import protect
from checkpointing.redundancy import Protection
from checkpointing.schema import Piece, Schema, ShardMap
from checkpointing.snapshot import aligned
from checkpointing.transfer import Destination, Holding, TransferPlan, plan_transfer
from orchestrator.policies import assign, choose_layout
from workers.plan import Member, Plan


@dataclass(frozen=True)
class Source:
    """The state to go on from: the holdings of one complete snapshot or checkpoint, or none for fresh weights.

    ``replaces``: the memory that other states lie in may be used again, see ``cover.may_replace_others``.
    """

    generation: int
    step: int
    cursor: list[int]
    tokens: int
    holdings: tuple[Holding, ...]
    tier: str
    replaces: bool = True

    @classmethod
    def fresh(cls) -> Source:
        return cls(0, 0, [0, 0, 0], 0, (), "init")

    @classmethod
    def of(cls, holdings: Sequence[Holding], tier: str, replaces: bool = True) -> Source:
        """From holdings of one (generation, step): their meta is the same on every rank."""
        snapshot = holdings[0].snapshot
        meta = snapshot.meta
        return cls(snapshot.generation, snapshot.step, meta["cursor"], meta["tokens"], tuple(holdings), tier, replaces)


@dataclass(frozen=True)
class NextGeneration:
    plan: Plan
    protected: Protection
    transfer: TransferPlan | None
    source: Source


def plan_generation(
    *,
    generation: int,
    schema: Schema,
    source: Source,
    preferred: Sequence[Layout] | None,
    is_possible: Callable[[Layout], bool],
    workers: Mapping[str, str],
    domains: Mapping[str, str],
    protection: ProtectionConfig,
    memory: Mapping[str, int],
    previous: Plan | None,
) -> NextGeneration | None:
    """The next generation on ``workers`` (id -> node), or None when no layout fits so few.

    ``domains`` maps every node with a living keeper to its failure domain, ``memory`` to bytes that arenas may take.
    """

    def members_of(layout: Layout) -> tuple[Member, ...]:
        before = (previous.layout, previous.members) if previous else None
        return tuple(Member(worker, workers[worker]) for worker in assign(layout, workers, before))

    own = _own_holdings(source, previous)

    @cache
    def transfer_to(layout: Layout) -> TransferPlan:
        shards = ShardMap(schema, layout)
        destinations = {
            rank: Destination(member.node, shards.pieces(rank), own.get(member.worker))
            for rank, member in enumerate(members_of(layout))
        }
        return plan_transfer(schema, source.holdings, destinations, domains)

    layout = choose_layout(
        preferred,
        len(workers),
        is_possible,
        lambda layout: transfer_to(layout).bytes_moved if source.holdings else 0,
    )
    if layout is None:
        return None
    members = members_of(layout)
    shards = ShardMap(schema, layout)
    protected = protect(
        [shards.pieces(rank) for rank in range(layout.size)],
        [member.node for member in members],
        domains,
        slot_nbytes(schema),
        protection.survive,
        protection.scheme,
        memory,
    )
    playing = {member.worker for member in members}
    buddies = [tuple(dict.fromkeys(node for send in sends for node in send.nodes)) for sends in protected.sends]
    plan = Plan(
        generation=generation,
        layout=layout,
        members=tuple(replace(member, buddies=nodes) for member, nodes in zip(members, buddies, strict=True)),
        spares=tuple(worker for worker in workers if worker not in playing),
        step=source.step,
        survives=protected.survives,
        asked=protection.survive,
        scheme=protected.scheme,
        guards=protected.guards,
    )
    return NextGeneration(plan, protected, transfer_to(layout) if source.holdings else None, source)


def slot_nbytes(schema: Schema) -> Callable[[Piece], int]:
    """How many bytes a piece takes in a slot."""
    itemsizes = {spec.name: np.dtype(spec.stored_as).itemsize for spec in schema.tensors}
    return lambda piece: aligned(volume(piece) * itemsizes[piece.name])


def _own_holdings(source: Source, previous: Plan | None) -> dict[str, HoldingKey]:
    """Worker -> key of the holding that it wrote itself, for those that played when the source was made."""
    if previous is None or previous.generation != source.generation:
        return {}
    wrote = {
        (holding.node, holding.snapshot.rank): holding.key for holding in source.holdings if holding.role == "primary"
    }
    players = {member.worker: (member.node, rank) for rank, member in enumerate(previous.members)}
    return {worker: wrote[place] for worker, place in players.items() if place in wrote}
