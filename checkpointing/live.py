"""State that no snapshot describes: what a layout's ranks hold by definition, and how they take from one another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from checkpointing.arena import ArenaAddress
from checkpointing.boxes import slices, volume
from checkpointing.holding import Holding
from checkpointing.layout import Layout
from checkpointing.load import Moved, Transport, load_state
from checkpointing.local_read import store
from checkpointing.schema import Piece, Schema, pieces
from checkpointing.snapshot import Record, Snapshot
from checkpointing.transfer import Fetch

_STORED_AS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}  # numpy has no such floats


def stored_as(dtype: str) -> np.dtype:
    """numpy's dtype for the bits of a tensor of ``dtype`` (see ``TensorSpec``)."""
    return np.dtype(_STORED_AS.get(dtype, dtype))


def live_holdings(schema: Schema, layout: Layout) -> list[Holding]:
    """What the ranks of ``layout`` hold, to plan with. A rank's node is its number, with zeros in front."""
    dtypes = {spec.name: stored_as(spec.dtype) for spec in schema.tensors}
    holdings = []
    for rank in range(layout.size):
        records = []
        for piece in pieces(schema, layout, rank):
            dtype = dtypes[piece.name]
            records.append(Record(piece, dtype.name, 0, volume(piece) * dtype.itemsize, ""))
        snapshot = Snapshot(0, 0, rank, str(layout), tuple(records), {})
        holdings.append(Holding(snapshot, 0, live_node(rank), "primary", "memory", ArenaAddress(0, (), 0, "")))
    return holdings


def live_node(rank: int) -> str:
    """Node of a rank in ``live_holdings``; sorts like the ranks."""
    return f"{rank:05d}"


def load_live(
    fetches: Iterable[Fetch], into: Mapping[Piece, np.ndarray], held: Mapping[Piece, np.ndarray], others: Transport
) -> Moved:
    """Fill ``into`` (see ``load_state``) from live state: this rank's own, which is ``held``, and that of ``others``.

    ``fetches`` were planned from ``live_holdings``, with the rank's own node as destination. Live state has no digests;
    what travels is digested for the journey.
    """
    remote = []
    for piece, parts in fetches:
        for part in parts:
            if part.local:
                source = held[part.record.piece][slices(part.box, part.record.piece)]
                store(into[piece], slices(part.box, piece), source)
        remote.append(Fetch(piece, tuple(part for part in parts if not part.local)))
    return load_state(remote, into, others)
