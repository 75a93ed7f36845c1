"""Workers with a fabricated mixture-of-experts state, which take it over and snapshot it as a training worker does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import ray

from checkpointing.arena import Arena
from checkpointing.keeper import Sending
from checkpointing.layout import Layout
from checkpointing.live import stored_as
from checkpointing.load import KeeperReads, Moved, load_state
from checkpointing.optimizer_state import optimizer_specs
from checkpointing.schema import Fused, Piece, Schema, ShardMap, TensorSpec
from checkpointing.snapshot import Snapshot, snapshot_nbytes, write_snapshot
from checkpointing.transfer import Fetch
from tests.checkpointing.node_keepers import cut, random_reference

LAYERS, EXPERTS, DIM, FFN, HEADS, KV_HEADS, VOCAB = 5, 8, 24, 36, 4, 2, 61
POISON = 0xA5


def expert_schema() -> Schema:
    """Five layers with grouped-query attention (Q, K and V in one tensor), eight experts and a router each.

    The vocabulary is padded for tensor parallelism, and the optimizer keeps two moments, factors and a count.
    """
    tensors = [TensorSpec("embedding", (VOCAB, DIM), "bfloat16", 0, "first", pad_to=8)]
    fused = []
    head = DIM // HEADS
    for layer in range(LAYERS):
        name, where = f"layers.{layer}", ("layer", layer)
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors.append(TensorSpec(f"{name}.{part}", (heads * head, DIM), "bfloat16", 0, *where, heads=heads))
        tensors += [
            TensorSpec(f"{name}.o", (DIM, DIM), "bfloat16", 1, *where),
            TensorSpec(f"{name}.norm", (DIM,), "float32", None, *where),
            TensorSpec(f"{name}.router", (EXPERTS, DIM), "float32", None, *where),
            TensorSpec(f"{name}.experts.up", (EXPERTS, FFN, DIM), "bfloat16", 1, *where, fsdp_dims=(0, 1), ep_dim=0),
            TensorSpec(f"{name}.experts.down", (EXPERTS, DIM, FFN), "bfloat16", 2, *where, fsdp_dims=(0, 1), ep_dim=0),
        ]
        fused += [Fused(f"{s}{name}.qkv", tuple(f"{s}{name}.{part}" for part in "qkv")) for s in ("", "m/", "v/")]
    tensors.append(TensorSpec("output", (VOCAB, DIM), "bfloat16", 0, "last", pad_to=8))
    return Schema((*tensors, *optimizer_specs(tensors, _states_of)), LAYERS, fused=tuple(fused))


def _states_of(shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], str]]:
    states: dict[str, tuple[tuple[int, ...], str]] = {
        "m": (shape, "float32"),
        "v": (shape, "float32"),
        "step": ((), "int64"),
    }
    return states | ({"row": (shape[:-1], "float32")} if len(shape) == 3 else {})


@ray.remote(num_cpus=0, max_restarts=0)
class Mover:
    """One worker beside the keeper of its node."""

    def __init__(self, keepers: dict[str, Any], node: str, buddy: str) -> None:
        self._keepers, self._keeper, self._buddy = keepers, keepers[node], keepers[buddy]
        self._schema = expert_schema()
        self._dtypes = {spec.name: stored_as(spec.dtype) for spec in self._schema.tensors}

    def fill(self, generation: int, layout: Layout, rank: int, seed: int) -> None:
        """The first state: boxes of the reference."""
        reference = random_reference(self._schema, seed)
        _, views = self._room(layout, rank)
        for piece, view in views.items():
            view[...] = cut(reference, piece)
        self._protect(generation, layout, rank, views)

    def take_over(self, generation: int, layout: Layout, rank: int, fetches: tuple[Fetch, ...]) -> Moved:
        """Into local tensors as a model has them: fused, padded, sharded. Padding must stay as it was."""
        arrays, views = self._room(layout, rank)
        keepers = self._keepers
        moved = load_state(fetches, views, KeeperReads(lambda node, asked: ray.get(keepers[node].read.remote(asked))))
        self._protect(generation, layout, rank, views)
        for view in views.values():
            view[...] = 0
        covered = sum(view.size for view in views.values())
        whole = sum(array.size for array in arrays)
        untouched = sum(int((array.reshape(-1).view(np.uint8) == POISON).sum()) // array.itemsize for array in arrays)
        assert untouched == whole - covered, "bytes outside of the rank's pieces were written to"
        return moved

    def _room(self, layout: Layout, rank: int) -> tuple[list[np.ndarray], dict[Piece, np.ndarray]]:
        """The rank's local tensors, full of poison, and the views of its pieces in them."""
        arrays: list[np.ndarray] = []
        views: dict[Piece, np.ndarray] = {}
        for local in ShardMap(self._schema, layout).local(rank):
            if local.places:
                dtype = self._dtypes[local.places[0].piece.name]
                room = np.full(math.prod(local.size) * dtype.itemsize, POISON, np.uint8)
                arrays.append(room.view(dtype).reshape(local.size))
                views |= {place.piece: place.view(arrays[-1]) for place in local.places}
        return arrays, views

    def _protect(self, generation: int, layout: Layout, rank: int, views: dict[Piece, np.ndarray]) -> None:
        opening = self._keeper.open_arena.remote(
            generation, rank, snapshot_nbytes(views), [Sending((self._buddy,), len(views), None, 0, {})]
        )
        arena = Arena.attach(ray.get(opening)[0])
        with arena.writing(0) as buffer:
            records = write_snapshot(buffer, views)
        snapshot = Snapshot(generation, generation, rank, str(layout), records, {})
        ray.get(self._keeper.protect.remote(snapshot, 0))
        arena.close()
