"""A durable checkpoint of a whole training state (parameters and AdamW's), from memory to disk, by one process.

Ours: what a keeper does with a pinned snapshot (every record checked against its digest, safetensors files, fsync, a
manifest with all digests, the mark, a rename, fsync of the folders). Theirs: `torch.distributed.checkpoint.save` of the
same tensors, with its defaults (one thread, fsync of files) and no digests. In turns, on the disk of the temporary
folder and on tmpfs, where fsync is free and what is left is the work itself. Below, a plain write and fsync of as much.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.rows import Peer, Row, compare, own
from benchmarks.training_state import training_state
from checkpointing.arena import ArenaAddress
from checkpointing.durable import commit, verify, write_share
from checkpointing.holding import Holding
from checkpointing.publish import begin
from checkpointing.shares import plan_shares
from checkpointing.snapshot import Snapshot, snapshot_nbytes, write_snapshot

NAME = "save"
_DCP = f"torch.distributed.checkpoint {torch.__version__}, save"


def run(quick: bool) -> list[Row]:
    """Quick: a tenth of it, three times. In full: 500 MB, eight times. The first time of each is not counted."""
    state = _State(quick)
    rows: list[Row] = []
    for place, parent in (("disk", None), ("tmpfs", "/dev/shm")):
        with tempfile.TemporaryDirectory(prefix="bench-", dir=parent) as folder:
            runs = _in_turns(state, Path(folder), 3 if quick else 9)
        figure = f"{place}: save {state.nbytes / 1e6:.0f} MB"
        rows += [
            compare(NAME, figure, runs["ours"], Peer(_DCP, runs["dcp"])),
            compare(NAME, figure, runs["ours"], Peer("write and fsync", runs["plain"])),
            own(NAME, f"{place}: ours", [state.nbytes / 1e9 / statistics.median(runs["ours"])], "GB/s"),
        ]
    return rows


class _State:
    """A training state with random values: as a pinned snapshot, and as the tensors that DCP takes."""

    def __init__(self, quick: bool) -> None:
        self.schema, arrays = training_state(quick)
        self.tensors = {box.name: torch.from_numpy(array) for box, array in arrays.items()}
        self.nbytes = sum(array.nbytes for array in arrays.values())
        self.buffer = np.empty(snapshot_nbytes(arrays), np.uint8)
        self.snapshot = Snapshot(1, 1, 0, "1", write_snapshot(self.buffer, arrays), {})
        self.holding = Holding(self.snapshot, 0, "node", "pin", "memory", ArenaAddress(0, (), 0, ""))

    def save_ours(self, folder: Path) -> None:
        attempt = begin(str(folder), self.snapshot.step)
        shares = plan_shares(self.schema, [self.holding])["node"]
        made = commit(
            attempt, self.schema, self.snapshot, write_share(attempt.url, [(share, self.buffer) for share in shares])
        )
        assert not verify(made, deep=False)

    def save_dcp(self, folder: Path) -> None:
        dcp.save(dict(self.tensors), checkpoint_id=folder, no_dist=True)

    def save_plain(self, folder: Path) -> None:
        folder.mkdir()
        with (folder / "file").open("wb", buffering=0) as file:
            rest = memoryview(self.buffer.data)
            while rest.nbytes:
                rest = rest[file.write(rest[: 8 << 20]) :]
            os.fsync(file.fileno())


def _in_turns(state: _State, folder: Path, repeats: int) -> dict[str, list[float]]:
    ways: dict[str, Callable[[Path], None]] = {
        "ours": state.save_ours,
        "dcp": state.save_dcp,
        "plain": state.save_plain,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(repeats):
        for way, save in ways.items():
            target = folder / f"{way}-{number}"
            started = time.perf_counter()
            save(target)
            seconds[way].append(time.perf_counter() - started)
            shutil.rmtree(target)
    return {way: runs[1:] for way, runs in seconds.items()}
