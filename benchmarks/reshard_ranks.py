"""Four processes that re-shard one state in turns: ours, torch.distributed.checkpoint, and plain copies.

``python -m benchmarks.reshard_ranks FOLDER RANK REPEATS MOVE…``: rank 0 prints the seconds of each measurement by move
and way. What a rank has afterwards is compared with what it should have, every time.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.dcp_state import as_dtensors
from checkpointing.arena import Arena, ArenaAddress, map_slot
from checkpointing.group_exchange import GroupExchange
from checkpointing.holding import Holding
from checkpointing.layout import Layout
from checkpointing.live import live_holdings, live_node, load_live
from checkpointing.load import KeeperReads, Moved, load_state
from checkpointing.schema import Piece, Schema, TensorSpec, pieces
from checkpointing.snapshot import Snapshot, snapshot_nbytes, write_snapshot
from checkpointing.transfer import Destination, Planner

NUM_RANKS = 4
DIM, FFN, LAYERS, VOCAB = 768, 2048, 4, 3328
State = dict[Piece, np.ndarray]


def schema() -> Schema:
    """A decoder of 33 million parameters with AdamW's state: 401 MB of float32."""
    shapes = {f"w{name}": ((DIM, DIM), 0) for name in "qkv"} | {"wo": ((DIM, DIM), 1)}
    shapes |= {"w1": ((FFN, DIM), 0), "w3": ((FFN, DIM), 0), "w2": ((DIM, FFN), 1)}
    tensors = []
    for state in ("", "exp_avg/", "exp_avg_sq/"):
        tensors.append(TensorSpec(f"{state}embedding", (VOCAB, DIM), "float32", 0, "first"))
        for layer in range(LAYERS):
            for name, (shape, dim) in shapes.items():
                tensors.append(TensorSpec(f"{state}layers.{layer}.{name}", shape, "float32", dim, "layer", layer))
        tensors.append(TensorSpec(f"{state}output", (VOCAB, DIM), "float32", 0, "last"))
    return Schema(tuple(tensors), LAYERS)


class Ranks:
    """This rank's end of every measurement."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.schema = folder, rank, schema()
        self.seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.move = ""
        self.staged = 0
        self._values = np.random.default_rng(0).standard_normal(FFN * DIM * 2, np.float32)  # of all tensors alike

    def state(self, layout: Layout) -> State:
        """Each element is the value at its place in the canonical tensor, so that every copy can be checked."""
        return {piece: self.expected(piece).copy() for piece in pieces(self.schema, layout, self.rank)}

    def expected(self, piece: Piece) -> np.ndarray:
        shape = next(spec.shape for spec in self.schema.tensors if spec.name == piece.name)
        whole = self._values[: np.prod(shape)].reshape(shape)
        return whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))]

    def room(self, layout: Layout) -> State:
        """Where the state under ``layout`` is to go: memory that is there already, as a model's is."""
        return {p: np.full(p.size, -1, np.float32) for p in pieces(self.schema, layout, self.rank)}

    @contextmanager
    def timed(self, way: str) -> Iterator[None]:
        """From the moment all ranks are there until the last is done."""
        dist.barrier()
        begun = time.perf_counter()
        yield
        dist.barrier()
        self.seconds[self.move][way].append(time.perf_counter() - begun)

    def check(self, state: Mapping[Piece, np.ndarray]) -> None:
        for piece, array in state.items():
            assert np.array_equal(array, self.expected(piece)), piece
            array.fill(-1)

    # The ways

    def ours(self, before: Layout, after: Layout) -> None:
        """Snapshot into an arena, as after every step; then what a recovery or a planned change does."""
        held, into = self.state(before), self.room(after)
        arena = Arena.create(snapshot_nbytes(held), num_slots=1)
        with self.timed("ours"):
            with self.timed("snapshot"), arena.writing(0) as buffer:
                records = write_snapshot(buffer, held)
            snapshot = Snapshot(1, 1, self.rank, str(before), records, {})
            mine = Holding(snapshot, 0, "node", "primary", "memory", arena.address)
            holdings: list[Holding] = [mine] * NUM_RANKS
            with self.timed("plan"):
                dist.all_gather_object(holdings, mine)
                fetches = Planner(self.schema, holdings).fetches(Destination("node", tuple(into)))
            with self.timed("load"):
                load_state(fetches, into, KeeperReads(_far), arena)
        self.check(into)
        self.copy_shared(holdings[(self.rank + 1) % NUM_RANKS], held)
        dist.barrier()
        arena.close()

    def group(self, before: Layout, after: Layout) -> None:
        """Live state over the process group."""
        held, into = self.state(before), self.room(after)
        nodes = {live_node(rank): rank for rank in range(NUM_RANKS)}
        destination = Destination(live_node(self.rank), tuple(into))
        with self.timed("group"):
            fetches = Planner(self.schema, live_holdings(self.schema, before)).fetches(destination)
            moved: Moved = load_live(fetches, into, held, GroupExchange(dist.group.WORLD, held, nodes))
        self.staged = max(self.staged, moved.staged)
        self.check(into)

    def dcp(self, before: Layout, after: Layout) -> None:
        """Its defaults, into memory (tmpfs)."""
        held, into = self.state(before), self.room(after)
        path = self.folder / "dcp"
        saved, loaded = (as_dtensors(self.schema, lay, self.rank, s) for lay, s in ((before, held), (after, into)))
        with self.timed("dcp"):
            with self.timed("dcp save"):
                dcp.save(saved, checkpoint_id=path)
            with self.timed("dcp load"):
                dcp.load(loaded, checkpoint_id=path)
        self.check(into)
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(path)

    def copy(self, after: Layout) -> None:
        """Each rank copies as many bytes as it has under ``after`` from memory to memory of its own, in one go."""
        target = np.concatenate([array.reshape(-1) for array in self.room(after).values()])
        source = target.copy()
        with self.timed("memcpy"):
            np.copyto(target, source)

    def copy_shared(self, other: Holding, held: State) -> None:
        """Each rank maps another's arena and copies as many bytes from there, in one go and unchecked."""
        target = np.full(sum(array.nbytes for array in held.values()), 1, np.uint8)
        assert isinstance(other.locator, ArenaAddress)
        with self.timed("memcpy shared"):
            data, _ = map_slot(other.locator, 0)
            np.copyto(target, data[: target.nbytes])


def _far(node: str, requests: object) -> object:
    raise AssertionError("all ranks are on one node")


def main(folder: str, rank: str, repeats: str, *moves: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=NUM_RANKS)
    ranks = Ranks(Path(folder), int(rank))
    for _ in range(int(repeats)):
        for ranks.move in moves:
            before, after = (Layout.parse(text) for text in ranks.move.split(">"))
            ranks.copy(after)
            ranks.ours(before, after)
            ranks.dcp(before, after)
            ranks.group(before, after)
    if int(rank) == 0:
        print(json.dumps({"seconds": ranks.seconds, "staged": ranks.staged}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
