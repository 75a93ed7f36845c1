"""What of a state is redundant already, and what needs a copy elsewhere. Pure logic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from checkpointing.schema import Piece


def unreplicated(held: Sequence[Sequence[Piece]], domains: Sequence[str]) -> tuple[frozenset[Piece], ...]:
    """For each rank, those of its pieces that no rank in another failure domain holds as well.

    ``held[rank]`` are a rank's pieces, ``domains[rank]`` the failure domain that it runs in. Data-parallel replicas
    hold equal boxes, and the vote makes their states equal, so such a replica is as good as a copy.
    """
    holders = defaultdict(set)
    for pieces, domain in zip(held, domains, strict=True):
        for piece in pieces:
            holders[piece].add(domain)
    return tuple(frozenset(piece for piece in pieces if len(holders[piece]) == 1) for pieces in held)
