"""The plan: one frozen object that says who does what in a generation, and the order that each worker gets from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from checkpointing.layout import Layout
from checkpointing.redundancy import Guard, Scheme, Send
from checkpointing.schema import Piece, Schema
from checkpointing.transfer import Fetch
from workers.program import Program


@dataclass(frozen=True)
class Member:
    """One rank of the generation's mesh: the worker that plays it, and its node.

    ``buddies``: the nodes that have copies of what only it holds, or parity.
    """

    worker: str
    node: str
    buddies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Who does what in one generation. ``members[rank]`` plays ``rank`` of ``layout``, starting after ``step``.

    ``survives``: how many failure domains can be lost at once without losing state that is in memory, by ``scheme``, as
    ``guards`` have it: where there is what. ``asked``: how many the job would survive.
    """

    generation: int
    layout: Layout
    members: tuple[Member, ...]
    spares: tuple[str, ...]
    step: int
    survives: int
    asked: int = 0
    scheme: Scheme = "natural"
    guards: tuple[Guard, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes that hold a member, in rank order, each once."""
        return tuple(dict.fromkeys(member.node for member in self.members))

    @property
    def all_nodes(self) -> tuple[str, ...]:
        """Also those that only have copies or parity."""
        return tuple(dict.fromkeys([*self.nodes, *(node for guard in self.guards for node in guard.nodes)]))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "layout": str(self.layout)}


@dataclass(frozen=True)
class Order:
    """What one worker needs to play its rank in a generation, from forming the groups to the last step.

    fetches     this rank's part of the transfer plan; None starts from fresh weights
    rendezvous  the keeper whose rendezvous this generation uses
    keepers     node -> keeper handle, for the pieces that lie on other nodes
    keeper      the keeper of the worker's own node
    written     what goes into this rank's snapshots; other ranks of its node write what else it holds
    sends       what the keeper sends on of every snapshot; replicas in other failure domains hold the rest
    readers     reader handles in this worker's order of preference
    spared      (generation, step) of the source: what other states lie in may be written over; None: nothing may
    cursor      position in the global data order of the first step to run
    tokens      valid tokens consumed so far (counts towards ``max_tokens``)
    log         file that gets what the process prints meanwhile
    """

    generation: int
    layout: Layout
    rank: int
    program: Program
    schema: Schema
    rendezvous: Any
    fetches: tuple[Fetch, ...] | None
    node: str
    keepers: dict[str, Any]
    keeper: Any
    written: tuple[Piece, ...]
    sends: tuple[Send, ...]
    readers: tuple[Any, ...]
    step: int
    spared: tuple[int, int] | None
    cursor: list[int]
    tokens: int
    snapshot_every: int | str
    durable_every: int
    detect_bound_s: float
    log: str


@dataclass(frozen=True)
class Outcome:
    """How one worker's part in a generation ended.

    kind      "finished" (an end condition), "paused" (asked to stop after a step), "fenced" (a peer failed) or
              "failed" (this worker raised)
    step      the last step whose optimizer update this worker applied
    ended_at  time of day at which the training thread left
    unusable  key of the holding that was damaged or gone when the state was taken over
    """

    kind: str
    step: int
    cause: str = ""
    ended_at: float = 0.0
    unusable: Any = None
