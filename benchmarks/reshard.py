"""Re-sharding 401 MB (33 million parameters and AdamW's state) among four processes of one machine.

Ours: a snapshot into shared memory as after every step, a plan, and every rank copies its part from the others' memory,
digests checked; and, without snapshots, over a gloo group. Theirs: `torch.distributed.checkpoint.save` and `load`
through tmpfs, with its defaults and no digests. One thread per process; all in turns. Times are from the moment all
ranks are there until the last is done. Below, what a mere copy of as many bytes takes: within each process, and out of
another's memory, which has to be mapped first (on this machine about as slow as the copy).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.reshard_ranks import NUM_RANKS
from benchmarks.rows import Peer, Row, compare, own

NAME = "reshard"
_MOVES = ("dp4>tp4", "dp4>pp4", "pp2.tp2>dp4")
_DCP = f"torch.distributed.checkpoint {torch.__version__}"


def run(quick: bool) -> list[Row]:
    """Quick: one move, twice. In full: three moves, seven times each. The first time of each is not counted."""
    moves, repeats = (_MOVES[:1], 2) if quick else (_MOVES, 8)
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as folder:
        found = _measure(Path(folder), moves, repeats)
    rows: list[Row] = []
    for move in moves:
        seconds = {way: runs[1:] for way, runs in found["seconds"][move].items()}
        name = move.replace(">", " to ").replace(".", "·")
        alone, shared = Peer("memcpy", seconds["memcpy"]), Peer("memcpy of another's memory", seconds["memcpy shared"])
        rows += [
            compare(
                NAME, f"{name}: snapshot, plan, re-shard", seconds["ours"], Peer(f"{_DCP}, save+load", seconds["dcp"])
            ),
            compare(
                NAME, f"{name}: of this, snapshot", seconds["snapshot"], Peer(f"{_DCP}, save", seconds["dcp save"])
            ),
            compare(NAME, f"{name}: of this, re-shard", seconds["load"], Peer(f"{_DCP}, load", seconds["dcp load"])),
            own(NAME, f"{name}: of this, plan", seconds["plan"]),
            compare(NAME, f"{name}: re-shard", seconds["load"], alone),
            compare(NAME, f"{name}: re-shard", seconds["load"], shared),
            compare(NAME, f"{name}: live, over gloo", seconds["group"], Peer(f"{_DCP}, save+load", seconds["dcp"])),
        ]
    return [*rows, own(NAME, "live, over gloo: most that a rank staged", [found["staged"] / 1e6], "MB")]


def _measure(folder: Path, moves: tuple[str, ...], repeats: int) -> dict:
    command = [sys.executable, "-m", "benchmarks.reshard_ranks", str(folder)]
    logs = [(folder / f"log-{rank}").open("w+") for rank in range(NUM_RANKS)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(repeats), *moves], stdout=log, stderr=subprocess.STDOUT)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [rank.wait(600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    texts = []
    for log in logs:
        log.seek(0)
        texts.append(log.read())
        log.close()
    for code, text in zip(codes, texts, strict=True):
        if code:
            raise RuntimeError(f"a rank ended with {code}; its last lines:\n" + "\n".join(text.splitlines()[-15:]))
    return json.loads(texts[0].splitlines()[-1])
