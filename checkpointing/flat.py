"""Flat buffers, as ZeRO, FSDP1 and distributed optimizers shard them: tensors joined end to end and cut anywhere."""

from __future__ import annotations

from collections.abc import Iterable

from checkpointing.boxes import flat_boxes, volume
from checkpointing.schema import Piece, Place


def flat_places(boxes: Iterable[Piece], start: int, stop: int) -> tuple[Place, ...]:
    """What lies in a 1-d local buffer that holds elements [start, stop) of ``boxes`` flattened and joined.

    ``boxes`` are what a rank holds before the buffer is cut (whole tensors, or their tensor-parallel parts), each in C
    order, one after the other. Of a tensor with d dims a buffer holds at most 2d - 1 boxes. Beyond the last box there
    is padding.
    """
    places, position = [], 0
    for box in boxes:
        lower, upper = max(start - position, 0), min(stop - position, volume(box))
        at = position + lower - start
        for piece in flat_boxes(box, lower, upper):
            places.append(Place(piece, (at,)))
            at += volume(piece)
        position += volume(box)
    return tuple(places)
