"""Run one rank's part of a transfer plan. Every byte is checked against its digest before it is used.

One engine for every way: what the rank can read by itself (memory of its node, files) is copied straight into place;
the rest comes through a *transport*, in waves of boxes packed one after the other, each checked and put in its place.
So beside the state itself there is never more than some waves of it in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from checkpointing.arena import Arena
from checkpointing.boxes import describe, slices, volume
from checkpointing.holding import DigestMismatch, ReadRequest
from checkpointing.local_read import OpenHolding, Wanted, store
from checkpointing.moves import Move, moves, waves
from checkpointing.schema import Piece
from checkpointing.snapshot import digest_of
from checkpointing.transfer import Fetch

ReadRemote = Callable[[str, list[ReadRequest]], tuple[np.ndarray, Sequence[str]]]
Deliver = Callable[[Sequence[Wanted], np.ndarray, Sequence[str]], None]

_AT_ONCE = 4


class Transport(Protocol):
    """A way to bytes of other processes."""

    def bring(self, wanted: Mapping[str, Sequence[Move]], deliver: Deliver) -> int:
        """Fetch ``wanted`` (by node that serves it); returns the most bytes that were staged at once.

        Hands on each wave: what it is, its bytes (uint8, 1-d: the boxes in C order one after the other) and each box's
        digest. May do so from several threads.
        """
        ...


@dataclass(frozen=True)
class Moved:
    """What it took to fill one rank's state, in bytes.

    read      from shared memory of the node and from files, by this process
    received  through the transport
    staged    most that was in staging buffers at once, beside the state itself
    """

    read: int
    received: int
    staged: int


def load_state(
    fetches: Iterable[Fetch], into: Mapping[Piece, np.ndarray], transport: Transport, mapped: Arena | None = None
) -> Moved:
    """Fill ``into`` (one array of shape ``piece.size`` per fetched piece, any strides, dtype as recorded).

    ``mapped`` is the arena that this process has mapped already, usually because it wrote there.

    Workers of the step that is read must have stopped by now, since local parts are read straight from their arenas.
    Raises DigestMismatch or HoldingGone, whose ``key`` names the holding to exclude from the next plan; ``into`` is
    partly filled then.
    """
    memory: list[Move] = []
    files: list[Move] = []
    remote: dict[str, list[Move]] = defaultdict(list)
    for move in moves(fetches):
        if not move.parts[0][1].local:
            remote[move.holding.node].append(move)
        else:
            (memory if move.holding.tier == "memory" else files).append(move)
    received: list[int] = []

    def deliver(wave: Sequence[Wanted], data: np.ndarray, digests: Sequence[str]) -> None:
        put_in_place(wave, data, digests, into)
        received.append(data.nbytes)

    def read(*moves: Move) -> int:
        return sum(OpenHolding.open(move.holding, mapped).copy(move.parts, into) for move in moves)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        # Several files at once, since they have a latency to hide. The transport keeps to this thread and is through
        # before a local holding is found to be damaged, so that no peer is left waiting for this rank.
        reads = [pool.submit(read, *memory), *(pool.submit(read, move) for move in files)]
        staged = transport.bring(remote, deliver)
        return Moved(sum(one.result() for one in reads), sum(received), staged)


def put_in_place(
    wave: Sequence[Wanted], data: np.ndarray, digests: Sequence[str], into: Mapping[Piece, np.ndarray]
) -> None:
    """Check packed boxes and copy each to where it belongs. Raises DigestMismatch before a damaged one is used."""
    start = 0
    for (piece, part), digest in zip(wave, digests, strict=True):
        nbytes = volume(part.box) * part.record.itemsize
        received = data[start : start + nbytes]
        if received.nbytes != nbytes or digest_of(received) != digest:
            sentence = f"{describe(part.box)} was damaged on its way from the {part.holding}"
            raise DigestMismatch(sentence, part.holding.key)
        store(into[piece], slices(part.box, piece), received.view(part.record.dtype).reshape(part.box.size))
        start += nbytes


class KeeperReads:
    """From the keepers of other nodes. ``read(node, requests)`` is ``Keeper.read`` there; it is called from threads."""

    def __init__(self, read: ReadRemote, wave_nbytes: int = 64 << 20) -> None:
        self._read, self._wave_nbytes = read, wave_nbytes

    def bring(self, wanted: Mapping[str, Sequence[Move]], deliver: Deliver) -> int:
        """See ``Transport``. Asks some nodes at a time, each for one wave after the other."""

        def ask(node: str) -> int:
            staged = 0
            for wave in waves(wanted[node], self._wave_nbytes):
                parts = [entry for move in wave for entry in move.parts]
                data, digests = self._read(node, [ReadRequest.of(p.holding, p.record, p.box) for _, p in parts])
                deliver(parts, data, digests)
                staged = max(staged, data.nbytes)
            return staged

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            largest = sorted(pool.map(ask, sorted(wanted)), reverse=True)
        return sum(largest[:_AT_ONCE])
