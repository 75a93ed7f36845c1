"""Keepers of several nodes in one process, and an unsharded reference to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from checkpointing import durable
from checkpointing.arena import Arena
from checkpointing.boxes import volume
from checkpointing.holding import Holding, ReadRequest
from checkpointing.keeper import Call, Keeper, Sending
from checkpointing.layout import Layout
from checkpointing.load import KeeperReads, load_state
from checkpointing.publish import begin, sweep
from checkpointing.redundancy import Protection, Send
from checkpointing.schema import Piece, Schema, TensorSpec, pieces
from checkpointing.shares import plan_shares
from checkpointing.snapshot import Snapshot, aligned, snapshot_nbytes, write_snapshot
from checkpointing.transfer import Destination, TransferPlan

STORED_AS = {"bfloat16": "uint16"}
TINY = Schema(
    (
        TensorSpec("embed.weight", (13, 6), "float32", 0, "first"),
        *(TensorSpec(f"layers.{i}.wq.weight", (7, 5), "float32", 1, "layer", i) for i in range(4)),
        *(TensorSpec(f"exp_avg/layers.{i}.wq.weight", (7, 5), "bfloat16", 1, "layer", i) for i in range(4)),
        TensorSpec("step", (), "int64", None, "all"),
    ),
    num_layers=4,
)

Reference = Mapping[str, np.ndarray]


def random_reference(schema: Schema, seed: int) -> Reference:
    """Random bits, so that NaN payloads and negative zeros are among them."""
    rng = np.random.default_rng(seed)
    reference = {}
    for spec in schema.tensors:
        dtype = np.dtype(STORED_AS.get(spec.dtype, spec.dtype))
        num_bytes = int(np.prod(spec.shape)) * dtype.itemsize
        reference[spec.name] = np.frombuffer(rng.bytes(num_bytes), dtype).reshape(spec.shape)
    return reference


def cut(reference: Reference, piece: Piece) -> np.ndarray:
    where = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))
    return reference[piece.name][(..., *where)]  # the ellipsis makes a view of a scalar too


class Nodes:
    """One keeper per node; each node's copies go to the next one."""

    def __init__(self, names: Sequence[str], copies: bool = True) -> None:
        self.names = names
        self.keepers = {name: Keeper(name, call_here) for name in names}
        self._copies = copies and len(names) > 1
        self.held: list[tuple[str, Piece]] = []  # (node, box), kept apart from the keepers' own tables
        self.arenas: dict[int, Arena] = {}

    def protect(
        self,
        schema: Schema,
        reference: Reference,
        layout: Layout,
        placement: Sequence[str],
        generation: int = 1,
        step: int = 1,
        durable: bool = False,
        protection: Protection | None = None,
    ) -> None:
        """What the workers of one generation do at the end of one step. By default each sends all to the next node."""
        for rank, node in enumerate(placement):
            mine = protection.written[rank] if protection else pieces(schema, layout, rank)
            buddy = self._next(node) if self._copies and protection is None else None
            sent = protection.sends[rank] if protection else [Send((buddy,), mine)] if buddy and mine else []
            first = [piece for send in sent for piece in send.pieces]
            state = {piece: cut(reference, piece) for piece in dict.fromkeys([*first, *mine])}
            sendings = [self._sending(send) for send in sent]
            address, _ = self.keepers[node].open_arena(generation, rank, snapshot_nbytes(state), sendings)
            arena, slot = Arena.attach(address), step % 2
            with arena.writing(slot) as buffer:
                records = write_snapshot(buffer, state)
            snapshot = Snapshot(generation, step, rank, str(layout), records, {"cursor": [0, step], "tokens": step})
            self.keepers[node].protect(snapshot, slot, durable)
            self.arenas[rank] = arena
            self.held += [(where, piece) for piece in state for where in (node, buddy) if where is not None]

    def inventory(self, alive: Iterable[str]) -> list[Holding]:
        return [holding for node in alive for holding in self.keepers[node].inventory()]

    def read(self, node: str, requests: list[ReadRequest]) -> tuple[np.ndarray, tuple[str, ...]]:
        return self.keepers[node].read(requests)

    def load(self, plan: TransferPlan, rank: int, destination: Destination, reference: Reference) -> None:
        """Load one rank, into arrays with unusual strides, and compare every bit with the reference."""
        into = {p: np.zeros(p.size[::-1], reference[p.name].dtype).T for p in destination.pieces}
        load_state(plan.fetches[rank], into, KeeperReads(self.read))
        for piece, array in into.items():
            assert array.tobytes() == cut(reference, piece).tobytes(), piece

    def close(self) -> None:
        for keeper in self.keepers.values():
            keeper.release(1 << 60)

    def _next(self, node: str) -> str:
        return self.names[(self.names.index(node) + 1) % len(self.names)]

    def _sending(self, send: Send) -> Sending:
        keepers = tuple(self.keepers[node] for node in send.nodes)
        peers = {node: self.keepers[node] for node in send.code.nodes} if send.code else {}
        return Sending(keepers, len(send.pieces), send.code, send.index, peers)


def call_here(calls: Sequence[Call]) -> list[Any]:
    """What actors do, one after the other; arrays are copied as on the way to another process."""
    return [
        getattr(keeper, method)(*(arg.copy() if isinstance(arg, np.ndarray) else arg for arg in args))
        for keeper, method, args in calls
    ]


def save_checkpoint(
    directory: str,
    step: int,
    layout: Layout,
    names: str = "abcd",
    schema: Schema = TINY,
    reference: Reference | None = None,
) -> str:
    """A checkpoint of ``reference`` (default ``random_reference(schema, step)``), written by keepers ``names``."""
    nodes = Nodes(names)
    try:
        placement = [names[rank % len(names)] for rank in range(layout.size)]
        state = random_reference(schema, step) if reference is None else reference
        nodes.protect(schema, state, layout, placement, step=step, durable=True)
        holdings = nodes.inventory(names)
        sweep(directory)  # as a run's driver does
        attempt = begin(directory, step)
        files = []
        for node, shares in plan_shares(schema, holdings).items():
            files += nodes.keepers[node].write_durable(step, 1, attempt.url, shares)
        checkpoint = durable.commit(attempt, schema, holdings[0].snapshot, files)
        assert all(holding.role != "pin" for holding in nodes.inventory(names)), "pins go once they are written"
        return checkpoint
    finally:
        nodes.close()


def record_nbytes(schema: Schema) -> Callable[[Piece], int]:
    """Bytes that a piece takes in a slot."""
    itemsizes = {spec.name: np.dtype(spec.stored_as).itemsize for spec in schema.tensors}
    return lambda piece: aligned(volume(piece) * itemsizes[piece.name])
