"""From what survives to the next plan: which state, which layout, who plays which rank, and what moves where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from checkpointing.holding import HoldingKey
from checkpointing.layout import Layout
from checkpointing.redundancy import unreplicated
from checkpointing.schema import Piece, Schema, ShardMap
from checkpointing.transfer import Destination, Holding, TransferPlan, plan_transfer
from orchestrator.policies import assign, buddies, choose_layout
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
    """``copied[rank]``: the pieces of a rank that its buddy keeps a copy of, because no replica elsewhere does."""

    plan: Plan
    copied: tuple[frozenset[Piece], ...]
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
    survive: int,
    previous: Plan | None,
) -> NextGeneration | None:
    """The next generation on ``workers`` (id -> node), or None when no layout fits so few.

    ``domains`` maps every node with a living keeper to its failure domain; copies go to another domain.
    """

    def members_of(layout: Layout) -> tuple[Member, ...]:
        before = (previous.layout, previous.members) if previous else None
        copies = buddies(domains) if survive else {}
        return tuple(
            Member(worker, workers[worker], copies.get(workers[worker])) for worker in assign(layout, workers, before)
        )

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
    held = [shards.pieces(rank) for rank in range(layout.size)]
    single = unreplicated(held, [domains[member.node] for member in members])
    playing = {member.worker for member in members}
    plan = Plan(
        generation=generation,
        layout=layout,
        members=members,
        spares=tuple(worker for worker in workers if worker not in playing),
        step=source.step,
        survives=int(all(member.buddy or not alone for member, alone in zip(members, single, strict=True))),
    )
    copied = tuple(alone if member.buddy else frozenset[Piece]() for member, alone in zip(members, single, strict=True))
    return NextGeneration(plan, copied, transfer_to(layout) if source.holdings else None, source)


def _own_holdings(source: Source, previous: Plan | None) -> dict[str, HoldingKey]:
    """Worker -> key of the holding that it wrote itself, for those that played when the source was made."""
    if previous is None or previous.generation != source.generation:
        return {}
    wrote = {
        (holding.node, holding.snapshot.rank): holding.key for holding in source.holdings if holding.role == "primary"
    }
    players = {member.worker: (member.node, rank) for rank, member in enumerate(previous.members)}
    return {worker: wrote[place] for worker, place in players.items() if place in wrote}
