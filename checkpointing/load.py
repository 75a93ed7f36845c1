"""Run one rank's part of a transfer plan. Every byte is checked against its digest before it is used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from checkpointing.arena import Arena, ArenaAddress, ArenaLost
from checkpointing.boxes import describe, slices, volume
from checkpointing.holding import DigestMismatch, Holding, HoldingGone, HoldingKey, ReadRequest, verify_record
from checkpointing.schema import Piece
from checkpointing.snapshot import digest_of
from checkpointing.transfer import Fetch, Part

ReadRemote = Callable[[str, list[ReadRequest]], tuple[np.ndarray, Sequence[str]]]

_WAVE_NBYTES = 256 << 20  # most bytes asked for in one call, which bounds the memory that both sides stage
_NUM_NODES_AT_ONCE = 4


def open_holding(holding: Holding) -> np.ndarray:
    """The buffer (uint8, 1-d) that the records of a holding on this node, or on disk, point into.

    Raises HoldingGone when its process or file is not there any more.
    """
    try:
        if isinstance(holding.locator, ArenaAddress):
            return Arena.attach(holding.locator).slot(holding.slot)
        return np.memmap(holding.locator, np.uint8, mode="r")
    except (ArenaLost, OSError, ValueError) as error:  # ValueError: numpy's answer to an empty file
        raise HoldingGone(f"{holding} is gone: {error}", holding.key) from None


def load_state(
    fetches: Iterable[Fetch],
    into: Mapping[Piece, np.ndarray],
    open_local: Callable[[Holding], np.ndarray],
    read_remote: ReadRemote,
) -> None:
    """Fill ``into`` (one array of shape ``piece.size`` per fetched piece, any strides, dtype as recorded).

    ``open_local`` is ``open_holding`` outside of tests. ``read_remote(node, requests)`` is ``Keeper.read`` of that
    node's keeper; it is called from threads. Workers of the step that is read must have stopped by now, since local
    parts are read straight from their arenas. Raises DigestMismatch or HoldingGone, whose ``key`` names the holding to
    exclude from the next plan; ``into`` is then partly filled.
    """
    local: dict[HoldingKey, list[tuple[Piece, Part]]] = defaultdict(list)
    remote: dict[str, list[tuple[Piece, Part]]] = defaultdict(list)
    for fetch in fetches:
        for part in fetch.parts:
            if part.local:
                local[part.holding.key].append((fetch.piece, part))
            else:
                remote[part.holding.node].append((fetch.piece, part))
    with ThreadPoolExecutor(_NUM_NODES_AT_ONCE) as pool:
        reads = [pool.submit(_load_remote, node, remote[node], into, read_remote) for node in sorted(remote)]
        for key in local:
            _load_local(local[key], into, open_local)
        for read in reads:
            read.result()


def _load_local(
    wanted: Sequence[tuple[Piece, Part]], into: Mapping[Piece, np.ndarray], open_local: Callable[[Holding], np.ndarray]
) -> None:
    holding = wanted[0][1].holding
    buffer = open_local(holding)
    verified = set()
    for piece, part in wanted:
        if part.record.piece not in verified:
            verify_record(part.record, buffer, str(holding), holding.key)
            verified.add(part.record.piece)
        source = part.record.array(buffer)[slices(part.box, part.record.piece)]
        _store(into[piece], slices(part.box, piece), source)


def _load_remote(
    node: str, wanted: Sequence[tuple[Piece, Part]], into: Mapping[Piece, np.ndarray], read_remote: ReadRemote
) -> None:
    for wave in _waves(wanted):
        data, digests = read_remote(node, [ReadRequest(p.holding.key, p.record, p.box) for _, p in wave])
        start = 0
        for (piece, part), digest in zip(wave, digests, strict=True):
            nbytes = volume(part.box) * part.record.itemsize
            received = data[start : start + nbytes]
            if received.nbytes != nbytes or digest_of(received) != digest:
                sentence = f"{describe(part.box)} was damaged on its way from the {part.holding}"
                raise DigestMismatch(sentence, part.holding.key)
            source = received.view(part.record.dtype).reshape(part.box.size)
            _store(into[piece], slices(part.box, piece), source)
            start += nbytes


def _waves(wanted: Sequence[tuple[Piece, Part]]) -> Iterator[list[tuple[Piece, Part]]]:
    wave: list[tuple[Piece, Part]] = []
    wave_nbytes = 0
    for piece, part in wanted:
        nbytes = volume(part.box) * part.record.itemsize
        if wave and wave_nbytes + nbytes > _WAVE_NBYTES:
            yield wave
            wave, wave_nbytes = [], 0
        wave.append((piece, part))
        wave_nbytes += nbytes
    yield wave


def _store(target: np.ndarray, where: tuple[slice, ...], source: np.ndarray) -> None:
    assert target.dtype == source.dtype, f"state of dtype {source.dtype} cannot fill an array of {target.dtype}"
    target[where] = source
