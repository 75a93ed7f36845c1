"""What makes the pieces of a state survive losses: who writes them, what is sent where, and what that guards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from checkpointing.schema import Piece

Scheme = Literal["natural", "replica", "parity"]


@dataclass(frozen=True)
class Code:
    """An erasure code. Shard ``i`` (data first, then parity) is on ``nodes[i]``, each in another failure domain.

    number  of the code, in its generation
    ranks   whose snapshot each shard of data is cut from; None for one that is all zeros
    nbytes  of the longest shard
    """

    number: int
    nodes: tuple[str, ...]
    ranks: tuple[int | None, ...]
    nbytes: int

    @property
    def num_data(self) -> int:
        return len(self.ranks)

    @property
    def num_parity(self) -> int:
        return len(self.nodes) - len(self.ranks)


@dataclass(frozen=True)
class Send:
    """What a rank's keeper sends on after each snapshot: ``pieces``, to each of ``nodes``.

    As a copy; or, where there is a ``code``, as its shard ``index``, ``nodes`` being those of the parity.
    """

    nodes: tuple[str, ...]
    pieces: tuple[Piece, ...]
    code: Code | None = None
    index: int = 0


@dataclass(frozen=True)
class Guard:
    """Where some pieces are. They are lost with all of ``primaries`` and ``copies``, unless ``needed`` shards are left.

    All are nodes. ``shards`` are those of a code that the pieces belong to, without shards of zeros.
    """

    primaries: tuple[str, ...]
    copies: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()
    needed: int = 0

    @property
    def nodes(self) -> tuple[str, ...]:
        return (*self.primaries, *self.copies, *self.shards)

    def source(self, lost: Iterable[str]) -> Literal["primary", "copy", "parity"] | None:
        """Where the pieces come from when the nodes ``lost`` are gone; None when they are lost too."""
        gone = set(lost)
        if not gone.issuperset(self.primaries):
            return "primary"
        if not gone.issuperset(self.copies):
            return "copy"
        return "parity" if self.shards and len(set(self.shards) - gone) >= self.needed else None

    def tolerance(self, domains: Mapping[str, str]) -> int:
        """How many failure domains can be lost, whichever they are; -1 when the pieces are lost already."""
        whole = {domains.get(node, node) for node in (*self.primaries, *self.copies)}
        shards = {domains.get(node, node) for node in self.shards}
        spare = len(shards) - self.needed if shards else -1
        # All that hold the pieces whole must go, and of the code one more than it can spare, which may be the same.
        return len(whole) + max(0, spare + 1 - len(whole & shards)) - 1


@dataclass(frozen=True)
class Protection:
    """``survives`` losses are survived, whichever they are, as ``guards`` have it.

    written  by rank: the pieces that go into its snapshots. Of the ranks of a node that hold a piece, one writes it.
    sends    by rank: what of them its keeper sends on; no piece is in two
    """

    written: tuple[tuple[Piece, ...], ...]
    sends: tuple[tuple[Send, ...], ...]
    guards: tuple[Guard, ...]
    scheme: Scheme
    survives: int


def code_guard(primaries: tuple[str, ...], code: Code) -> Guard:
    """Of pieces that are in a shard of ``code`` and whole on ``primaries``."""
    data = [node for node, rank in zip(code.nodes, code.ranks, strict=False) if rank is not None]
    return Guard(primaries, (), (*data, *code.nodes[code.num_data :]), len(data))
