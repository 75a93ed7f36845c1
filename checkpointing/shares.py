"""Who writes what of a checkpoint: every box once, by one of the keepers that have it, bytes spread evenly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from checkpointing.boxes import volume
from checkpointing.checkpoint_file import Share
from checkpointing.cover import StateLost, describe_missing, held_boxes, missing_boxes
from checkpointing.holding import Holding
from checkpointing.schema import Piece, Schema
from checkpointing.snapshot import Record

_PREFERENCE = ("pin", "primary", "copy", "decoded")


def plan_shares(schema: Schema, holdings: Sequence[Holding]) -> dict[str, tuple[Share, ...]]:
    """Per node what its keeper writes, from memory holdings of one step.

    Pins come before primaries, those before copies, and what must be decoded comes last. Every node with a holding is
    in the result, perhaps with nothing to write, since ``Keeper.write_durable`` also drops the pins. A node's n-th box
    of a tensor goes into its n-th file, because a safetensors file has one tensor per name. Raises StateLost when a box
    is missing.
    """
    missing = missing_boxes(schema, held_boxes(holdings))
    if missing:
        raise StateLost(describe_missing(holdings[0].snapshot.step if holdings else None, missing), missing)
    specs = {spec.name: spec for spec in schema.tensors}
    holders: dict[Piece, list[tuple[Holding, Record]]] = defaultdict(list)
    for holding in sorted(holdings, key=lambda holding: holding.key):
        for record in holding.snapshot.records:
            if record.piece.name in specs:
                holders[record.piece].append((holding, record))
    nodes = sorted({holding.node for holding in holdings})
    load = dict.fromkeys(nodes, 0)
    num_boxes: dict[tuple[str, str], int] = defaultdict(int)  # by node and tensor
    shares: dict[str, list[Share]] = {node: [] for node in nodes}
    for piece in sorted(holders, key=lambda piece: (-volume(piece), piece)):
        best = min(_PREFERENCE.index(holding.role) for holding, _ in holders[piece])
        able = [pair for pair in holders[piece] if pair[0].role == _PREFERENCE[best]]
        holding, record = min(able, key=lambda pair: (load[pair[0].node], pair[0].key))
        node = holding.node
        load[node] += record.nbytes
        folder = "data/optimizer" if "/" in piece.name else "data"
        file = f"{folder}/{nodes.index(node):05d}-{num_boxes[node, piece.name]:05d}.safetensors"
        num_boxes[node, piece.name] += 1
        shares[node].append(Share(holding, record, specs[piece.name].dtype, file))
    return {node: tuple(shares[node]) for node in nodes}
