"""The transport over a torch process group: whoever needs a box asks the rank that has it.

The group may be of any backend that has ``all_to_all_single`` for bytes; all of its ranks exchange together, also those
that need nothing. Only what was asked for is packed and sent, so that a view never drags its tensor over the wire.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from checkpointing.boxes import slices, volume
from checkpointing.load import Deliver
from checkpointing.local_read import Wanted
from checkpointing.moves import Move, waves
from checkpointing.schema import Piece
from checkpointing.snapshot import digest_of

_DIGEST_NBYTES = 16
_Ask = tuple[Piece, Piece]  # the holder's piece, and the box of it that is wanted


class GroupExchange:
    """One rank's end. ``held``: what this rank serves, by piece; ``nodes``: which rank of the group serves for a node.

    At most ``staging_nbytes`` are staged at once, for sending and receiving together. ``device`` is where the group's
    backend takes its buffers from.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        held: Mapping[Piece, np.ndarray],
        nodes: Mapping[str, int],
        staging_nbytes: int = 64 << 20,
        device: torch.device | None = None,
    ) -> None:
        self._group, self._held, self._nodes = group, held, nodes
        self._device = device or torch.device("cpu")
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        # Two waves are under way (one is packed while the other travels), each once on the way out and once in.
        self._wave_nbytes = staging_nbytes // 4 // max(1, self._size - 1)

    def bring(self, wanted: Mapping[str, Sequence[Move]], deliver: Deliver) -> int:
        """See ``Transport``. A damaged wave is reported once all are through, so that no peer is left waiting."""
        mine: list[list[list[Wanted]]] = [[] for _ in range(self._size)]
        for node, moves in wanted.items():
            cut = waves(moves, self._wave_nbytes)
            mine[self._nodes[node]] = [[entry for move in wave for entry in move.parts] for wave in cut]
        asked = self._ask([[[(p.record.piece, p.box) for _, p in wave] for wave in peer] for peer in mine])
        num_waves = self._most(max(map(len, mine)))
        staged, error = 0, None
        before: tuple[Any, list[Sequence[Wanted]], _Wave] | None = None
        for index in range(num_waves + 1):
            after = None
            if index < num_waves:
                expected: list[Sequence[Wanted]] = [peer[index] if index < len(peer) else () for peer in mine]
                wave = self._pack([peer[index] if index < len(peer) else () for peer in asked], expected)
                after = wave.begin(self._group), expected, wave
                staged = max(staged, wave.nbytes + (before[2].nbytes if before else 0))
            if before is not None:
                work, expected, wave = before
                work.wait()
                try:
                    for peer, (digests, data) in zip(expected, wave.received(expected), strict=True):
                        if peer:
                            deliver(peer, data, digests)
                except RuntimeError as damaged:
                    error = error or damaged
            before = after
        if error is not None:
            raise error
        return staged

    def _ask(self, requests: Sequence[Sequence[Sequence[_Ask]]]) -> list[list[list[_Ask]]]:
        """Tell every peer what this rank wants of it, wave by wave; returns what each of them wants of this rank."""
        texts = [np.frombuffer(json.dumps(peer).encode(), np.uint8) for peer in requests]
        sizes = torch.tensor([text.nbytes for text in texts], device=self._device)
        theirs = torch.empty_like(sizes)
        dist.all_to_all_single(theirs, sizes, group=self._group)
        splits = theirs.tolist()
        sent = torch.from_numpy(np.concatenate(texts)).to(self._device)
        received = torch.empty(sum(splits), dtype=torch.uint8, device=self._device)
        dist.all_to_all_single(received, sent, splits, sizes.tolist(), group=self._group)
        asked = []
        for text in received.cpu().split(splits):
            peer = json.loads(text.numpy().tobytes())
            asked.append([[(_piece(record), _piece(box)) for record, box in wave] for wave in peer])
        return asked

    def _most(self, number: int) -> int:
        most = torch.tensor([number], device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        return int(most)

    def _pack(self, asked: Sequence[Sequence[_Ask]], expected: Sequence[Sequence[Wanted]]) -> _Wave:
        """For each peer the digests of the boxes that it asked for, then the boxes."""
        boxes = [[self._held[record][slices(box, record)] for record, box in peer] for peer in asked]
        sizes = [sum(box.nbytes + _DIGEST_NBYTES for box in peer) for peer in boxes]
        packed = np.empty(sum(sizes), np.uint8)
        start = 0
        for peer in boxes:
            digest_at, start = start, start + len(peer) * _DIGEST_NBYTES
            for box in peer:
                target = packed[start : start + box.nbytes]
                target.view(box.dtype).reshape(box.shape)[...] = box
                digest = np.frombuffer(bytes.fromhex(digest_of(target)), np.uint8)
                packed[digest_at : digest_at + _DIGEST_NBYTES] = digest
                digest_at, start = digest_at + _DIGEST_NBYTES, start + box.nbytes
        incoming = [sum(volume(p.box) * p.record.itemsize + _DIGEST_NBYTES for _, p in peer) for peer in expected]
        return _Wave(packed, sizes, incoming, self._device)


class _Wave:
    """One all-to-all of packed boxes."""

    def __init__(self, packed: np.ndarray, sizes: list[int], incoming: list[int], device: torch.device) -> None:
        self._sent, self._sizes, self._incoming = torch.from_numpy(packed).to(device), sizes, incoming
        self._received = torch.empty(sum(incoming), dtype=torch.uint8, device=device)
        self.nbytes = self._sent.nbytes + self._received.nbytes

    def begin(self, group: dist.ProcessGroup) -> Any:
        splits = self._incoming, self._sizes
        return dist.all_to_all_single(self._received, self._sent, *splits, group=group, async_op=True)

    def received(self, expected: Sequence[Sequence[Wanted]]) -> list[tuple[list[str], np.ndarray]]:
        """By peer the digests and the boxes."""
        found = []
        for peer, block in zip(expected, self._received.cpu().split(self._incoming), strict=True):
            data, cut = block.numpy(), len(peer) * _DIGEST_NBYTES
            digests = [data[at : at + _DIGEST_NBYTES].tobytes().hex() for at in range(0, cut, _DIGEST_NBYTES)]
            found.append((digests, data[cut:]))
        return found


def _piece(fields: Sequence[Any]) -> Piece:
    name, offset, size = fields
    return Piece(name, tuple(offset), tuple(size))
