"""A lost worker's state of 500 MB (parameters and AdamW's), from memory into another process's tensors.

Ours, from the keeper (a Ray actor, as in a job) that the worker wrote its snapshot to: by a process on the keeper's
node, straight from the shared memory, and by one on another Ray node, which reads through Ray. With plan and digests.
Theirs: `torch.distributed.checkpoint.load` of the same tensors, with its defaults and no digests, from tmpfs, from the
disk of the temporary folder, and from there when nothing of it is in the page cache. All in turns; the tensors are
there before, as a model's are. Below, a plain copy of as much. One machine: no network is between its nodes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed.checkpoint as dcp
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.rows import Peer, Row, compare, own
from benchmarks.training_state import training_state
from checkpointing.arena import Arena
from checkpointing.layout import Layout
from checkpointing.load import KeeperReads, load_state
from checkpointing.snapshot import Snapshot, snapshot_nbytes, write_snapshot
from checkpointing.transfer import Destination, Planner
from orchestrator.actors import KeeperActor
from orchestrator.local_cluster import local_cluster

NAME = "restore"
_DCP = f"torch.distributed.checkpoint {torch.__version__}, load"
_OBJECT_STORE_BYTES = 2 << 30  # of each node; a fraction of what Ray takes by itself
_KEEPER = "keeper"  # the keeper's node, as plans call it


def run(quick: bool) -> list[Row]:
    """Quick: a tenth of it, twice. In full: 500 MB, six times. The first time is not counted."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as disk,
        tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as tmpfs,
        local_cluster(num_nodes=2, cpus_per_node=1, object_store_nbytes=_OBJECT_STORE_BYTES) as cluster,
    ):
        ray.init(address=cluster.address, log_to_driver=False)
        try:
            seconds = _in_turns([node.node_id for node in cluster.nodes], quick, Path(disk), Path(tmpfs))
        finally:
            ray.shutdown()
    return _rows(seconds, sum(array.nbytes for array in training_state(quick)[1].values()))


def _rows(seconds: dict[str, list[float]], nbytes: int) -> list[Row]:
    rows: list[Row] = []
    for way, figure in (("here", "from the node's memory"), ("elsewhere", "from another node's memory")):
        rows += [
            compare(NAME, f"{figure}: {nbytes / 1e6:.0f} MB", seconds[way], Peer(f"{_DCP} from {peer}", seconds[peer]))
            for peer in ("tmpfs", "disk, cached", "disk")
        ]
        rows.append(compare(NAME, f"{figure}: {nbytes / 1e6:.0f} MB", seconds[way], Peer("memcpy", seconds["memcpy"])))
    return [*rows, own(NAME, "of this, plan", seconds["plan"])]


def _in_turns(nodes: list[str], quick: bool, disk: Path, tmpfs: Path) -> dict[str, list[float]]:
    def on(node: str, actor: Any, *arguments: Any) -> Any:
        placed = NodeAffinitySchedulingStrategy(node, soft=False)
        return actor.options(num_cpus=0, scheduling_strategy=placed, max_concurrency=4).remote(*arguments)

    keeper = on(nodes[0], KeeperActor, _KEEPER, 600.0)
    here, elsewhere, writer = (on(node, _Worker, quick) for node in (nodes[0], nodes[1], nodes[0]))
    folders = {"tmpfs": tmpfs / "saved", "disk": disk / "saved"}
    for folder in folders.values():
        ray.get(writer.save.remote(str(folder)))
    ways: dict[str, Callable[[], Any]] = {
        "here": lambda: here.restore.remote(keeper, _KEEPER),
        "elsewhere": lambda: elsewhere.restore.remote(keeper, "another"),
        "tmpfs": lambda: here.load.remote(str(folders["tmpfs"]), True),
        "disk, cached": lambda: here.load.remote(str(folders["disk"]), True),
        "disk": lambda: here.load.remote(str(folders["disk"]), False),
        "memcpy": lambda: here.copy.remote(),
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    for repeat in range(2 if quick else 7):
        for way, measure in ways.items():
            # Anew, since what has been verified in a snapshot once is not verified again.
            ray.get(writer.write.remote(keeper, len(ways) * repeat + len(seconds[way])))
            measured = ray.get(measure())
            if repeat:
                for part, value in measured.items():
                    seconds[part or way].append(value)
    shutil.rmtree(folders["tmpfs"])
    return seconds


@ray.remote
class _Worker:
    """A process that has the state's tensors, as a worker has."""

    def __init__(self, quick: bool) -> None:
        torch.set_num_threads(1)
        self._schema, self._expected = training_state(quick)
        self._state = {piece: array.copy() for piece, array in self._expected.items()}
        self._tensors = {piece.name: torch.from_numpy(array) for piece, array in self._state.items()}
        self._arena: Arena | None = None

    def write(self, keeper: Any, step: int) -> None:
        """A snapshot, as after a step."""
        if self._arena is None:
            opening = keeper.open_arena.remote(1, 0, snapshot_nbytes(self._expected))
            self._arena = Arena.attach(ray.get(opening)[0])
        with self._arena.writing(0) as buffer:
            records = write_snapshot(buffer, self._expected)
        ray.get(keeper.protect.remote(Snapshot(1, step, 0, str(Layout()), records, {}), 0))

    def restore(self, keeper: Any, node: str) -> dict[str, float]:
        """Seconds from an inventory to the state in place, and the plan's share of them."""
        self._forget()
        holdings = ray.get(keeper.inventory.remote())
        begun = time.perf_counter()
        fetches = Planner(self._schema, holdings).fetches(Destination(node, tuple(self._state)))
        planned = time.perf_counter()
        load_state(fetches, self._state, KeeperReads(lambda _, asked: ray.get(keeper.read.remote(asked))))
        return self._restored({"": time.perf_counter() - begun, "plan": planned - begun})

    def save(self, folder: str) -> None:
        dcp.save(dict(self._tensors), checkpoint_id=folder, no_dist=True)

    def load(self, folder: str, cached: bool) -> dict[str, float]:
        self._forget()
        for path in Path(folder).iterdir():
            with path.open("rb") as file:
                if cached:
                    file.read()
                else:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begun = time.perf_counter()
        dcp.load(dict(self._tensors), checkpoint_id=folder, no_dist=True)
        return self._restored({"": time.perf_counter() - begun})

    def copy(self) -> dict[str, float]:
        self._forget()
        begun = time.perf_counter()
        for piece, array in self._state.items():
            np.copyto(array, self._expected[piece])
        return self._restored({"": time.perf_counter() - begun})

    def _forget(self) -> None:
        for array in self._state.values():
            array.fill(-1)

    def _restored(self, seconds: dict[str, float]) -> dict[str, float]:
        for piece, array in self._state.items():
            assert np.array_equal(array, self._expected[piece]), piece
        return seconds
