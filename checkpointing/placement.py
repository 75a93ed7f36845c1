"""Where the redundancy of a state goes, so that it survives a number of losses. Pure logic.

A loss is that of a failure domain. Data-parallel replicas hold equal pieces, and the vote makes their states equal, so
one in another domain is as good as a copy (*natural*). What is still missing is sent to keepers: whole (*replica*), or
as shards of erasure codes (*parity*). Copies and codes stay inside groups of domains that share no member: of two
random losses, fewer fall into one group than would meet on a ring.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from checkpointing.redundancy import Code, Guard, Protection, Scheme, Send, code_guard
from checkpointing.schema import Piece

WIDEST = 8  # domains that a code spans: a wider one costs less memory, but reads more peers and fails harder

_Sends = list[list["Send"]]
_Owned = list[list[tuple[Piece, frozenset[str]]]]  # by rank: a piece that it must send on, and the domains that have it


def protect(
    held: Sequence[Sequence[Piece]],
    nodes: Sequence[str],
    domains: Mapping[str, str],
    nbytes_of: Callable[[Piece], int],
    survive: int,
    scheme: Literal["auto", "replica", "parity"] = "auto",
    memory: Mapping[str, int] | None = None,
    widest: int = WIDEST,
) -> Protection:
    """The protection of ranks that hold the pieces ``held[rank]`` on ``nodes[rank]`` against ``survive`` losses.

    ``domains``: node -> failure domain, of all nodes with a keeper. ``survive`` is cut to one less than there are
    domains, and parity to copies where a code could have one shard of data only. ``nbytes_of`` a piece: bytes it takes
    in a slot. ``auto``: copies, unless with them some node's arenas outgrow its ``memory`` (bytes).
    """
    there = _Domains(domains)
    survive = min(survive, len(there.names) - 1)
    where = [domains[node] for node in nodes]
    writers = _writers(held, nodes, nbytes_of)
    written: list[list[Piece]] = [[] for _ in nodes]
    for piece, ranks in writers.items():
        for rank in ranks:
            written[rank].append(piece)
    owned = _owners(writers, where, survive, nbytes_of)
    sends: _Sends = _copies(owned, nodes, where, there, survive)
    used: Scheme = "replica" if any(sends) else "natural"
    wanted = scheme == "parity" or (scheme == "auto" and memory and not _fits(memory, written, nodes, sends, nbytes_of))
    if used == "replica" and wanted and len(there.names) >= survive + 2:
        used, sends = "parity", _codes(owned, nodes, where, there, survive, nbytes_of, widest)
    guards = _guards(writers, nodes, sends)
    survives = min((guard.tolerance(domains) for guard in guards), default=0)
    return Protection(tuple(map(tuple, written)), tuple(map(tuple, sends)), guards, used, survives)


class _Domains:
    """Failure domains and their nodes, in the order of placement."""

    def __init__(self, domains: Mapping[str, str]) -> None:
        self.nodes: dict[str, list[str]] = defaultdict(list)
        for node, domain in domains.items():
            self.nodes[domain].append(node)
        self.names = list(self.nodes)

    def groups(self, number: int) -> list[list[str]]:
        """The domains in ``number`` groups of neighbours, as equal as can be."""
        cuts = [index * len(self.names) // number for index in range(number + 1)]
        return [self.names[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]

    def node(self, domain: str, index: int) -> str:
        return self.nodes[domain][index % len(self.nodes[domain])]


def _writers(
    held: Sequence[Sequence[Piece]], nodes: Sequence[str], nbytes_of: Callable[[Piece], int]
) -> dict[Piece, list[int]]:
    """On every node one of the ranks that hold a piece there, so that each of them writes about as much."""
    holders: dict[Piece, list[int]] = defaultdict(list)
    for rank, pieces in enumerate(held):
        for piece in pieces:
            holders[piece].append(rank)
    load = [0] * len(nodes)
    alike: dict[tuple[int, ...], list[list[int]]] = {}
    writers: dict[Piece, list[int]] = {}
    for piece, ranks in holders.items():
        key = tuple(ranks)
        if key not in alike:
            together: dict[str, list[int]] = defaultdict(list)
            for rank in ranks:
                together[nodes[rank]].append(rank)
            alike[key] = list(together.values())
        nbytes = nbytes_of(piece)
        writers[piece] = [min(here, key=load.__getitem__) for here in alike[key]]
        for rank in writers[piece]:
            load[rank] += nbytes
    return writers


def _owners(
    writers: Mapping[Piece, Sequence[int]], where: Sequence[str], survive: int, nbytes_of: Callable[[Piece], int]
) -> _Owned:
    """What too few domains hold, dealt to the ranks that write it so that each sends about as much."""
    owned: _Owned = [[] for _ in where]
    load = [0] * len(where)
    alike: dict[tuple[int, ...], frozenset[str]] = {}
    for piece, ranks in writers.items():
        key = tuple(ranks)
        if key not in alike:
            alike[key] = frozenset(where[rank] for rank in ranks)
        if len(alike[key]) <= survive:
            owner = min(ranks, key=lambda rank: (load[rank], rank)) if len(ranks) > 1 else ranks[0]
            load[owner] += nbytes_of(piece)
            owned[owner].append((piece, alike[key]))
    return owned


def _copies(owned: _Owned, nodes: Sequence[str], where: Sequence[str], there: _Domains, survive: int) -> _Sends:
    """To the domains that follow in the own group (of as many as hold a piece then); outside of it only if need be."""
    following: dict[str, list[str]] = {}
    for group in there.groups(max(1, len(there.names) // (survive + 1))):
        for index, domain in enumerate(group):
            near = [*group[index + 1 :], *group[:index]]
            following[domain] = [*near, *(name for name in there.names if name not in group)]
    sends: _Sends = []
    for rank, pieces in enumerate(owned):
        seat = there.nodes[where[rank]].index(nodes[rank])
        alike: dict[frozenset[str], list[Piece]] = defaultdict(list)
        for piece, having in pieces:
            alike[having].append(piece)
        by_target: dict[tuple[str, ...], list[Piece]] = defaultdict(list)
        for having, chosen in alike.items():
            free = [domain for domain in following[where[rank]] if domain not in having]
            by_target[tuple(there.node(domain, seat) for domain in free[: survive + 1 - len(having)])] += chosen
        sends.append([Send(target, tuple(chosen)) for target, chosen in by_target.items()])
    return sends


def _codes(
    owned: _Owned,
    nodes: Sequence[str],
    where: Sequence[str],
    there: _Domains,
    survive: int,
    nbytes_of: Callable[[Piece], int],
    widest: int,
) -> _Sends:
    """Every group of g domains has g codes for each rank that its domains have; each domain is a place in all of them.

    Code c has its shards at the places c, c+1, ... around the group, the last ``survive`` of them parity. So a rank's
    pieces are dealt to k = g - survive codes, and a place holds the parity of as many codes as losses are survived. A
    piece lies in one shard whole: its digest proves the shard as it arrives, and a decode reads its range alone.
    """
    sends: _Sends = [[] for _ in where]
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, domain in enumerate(where):
        ranks_of[domain].append(rank)
    num_groups = min(math.ceil(len(there.names) / widest), len(there.names) // (survive + 2))
    number = 0
    for group in there.groups(num_groups):
        width, num_data = len(group), len(group) - survive
        for column in range(max(len(ranks_of[domain]) for domain in group)):
            ranks = [next(iter(ranks_of[domain][column : column + 1]), None) for domain in group]
            places = [
                there.node(domain, column) if rank is None else nodes[rank]
                for domain, rank in zip(group, ranks, strict=True)
            ]
            longest = [0] * width
            shards: dict[tuple[int, int], tuple[int, list[Piece]]] = {}
            for place, rank in ((place, rank) for place, rank in enumerate(ranks) if rank is not None):
                # Long shards into codes that have a long one already, so that less of them is padding.
                mine = sorted(((place - index) % width for index in range(num_data)), key=lambda c: (-longest[c], c))
                for code, (nbytes, chosen) in zip(mine, _deal(owned[rank], num_data, nbytes_of), strict=True):
                    if chosen:
                        shards[code, (place - code) % width] = rank, chosen
                        longest[code] = max(longest[code], nbytes)
            for c in range(width):
                around = tuple(places[(c + index) % width] for index in range(width))
                having = tuple(shards[c, index][0] if (c, index) in shards else None for index in range(num_data))
                code_ = Code(number, around, having, longest[c])
                for index, owner in enumerate(having):
                    if owner is not None:
                        sends[owner].append(Send(around[num_data:], tuple(shards[c, index][1]), code_, index))
                number += longest[c] > 0
    return sends


def _deal(
    owned: Sequence[tuple[Piece, frozenset[str]]], number: int, nbytes_of: Callable[[Piece], int]
) -> list[tuple[int, list[Piece]]]:
    """(bytes, pieces) of ``number`` parts, about equal, the largest first: every piece goes where there is least."""
    loads, parts = [0] * number, [list[Piece]() for _ in range(number)]
    for piece in sorted((piece for piece, _ in owned), key=lambda piece: (-nbytes_of(piece), piece)):
        least = loads.index(min(loads))
        loads[least] += nbytes_of(piece)
        parts[least].append(piece)
    return sorted(zip(loads, parts, strict=True), key=lambda part: -part[0])


def _fits(
    memory: Mapping[str, int],
    written: Sequence[Sequence[Piece]],
    nodes: Sequence[str],
    sends: Sequence[Sequence[Send]],
    nbytes_of: Callable[[Piece], int],
) -> bool:
    """Whether two slots of every snapshot and copy go into each node's ``memory``; a node without a figure has room."""
    needed: dict[str, int] = defaultdict(int)
    for node, pieces, sent in zip(nodes, written, sends, strict=True):
        needed[node] += 2 * sum(map(nbytes_of, pieces))
        for send in sent:
            for target in send.nodes:
                needed[target] += 2 * sum(map(nbytes_of, send.pieces))
    return all(nbytes <= memory.get(node, nbytes) for node, nbytes in needed.items())


def _guards(
    writers: Mapping[Piece, Sequence[int]], nodes: Sequence[str], sends: Sequence[Sequence[Send]]
) -> tuple[Guard, ...]:
    sent = {piece: send for of_rank in sends for send in of_rank for piece in send.pieces}
    alike = {(tuple(ranks), id(sent.get(piece))): piece for piece, ranks in writers.items()}
    found: dict[Guard, None] = {}
    for piece in alike.values():
        primaries = tuple(dict.fromkeys(nodes[rank] for rank in writers[piece]))
        send = sent.get(piece)
        if send is None:
            guard = Guard(primaries)
        elif send.code is None:
            guard = Guard(primaries, send.nodes)
        else:
            guard = code_guard(primaries, send.code)
        found[guard] = None
    return tuple(found)
