"""Erasure coding of a state in memory, by one thread: parity of all shards, and as many lost shards as there is parity.

Ours: ISA-L from pyeclib's wheel, on the shards where they are; and numpy alone, which takes over where there is no such
library. Theirs: zfec, and PyECLib's own API over the same ISA-L, which takes bytes in segments (1 MiB, its best here)
and returns bytes with headers. All in turns, with random bytes. Below, a plain copy of as much source data.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks.rows import Peer, Row, compare, own
from checkpointing.erasure import accumulate, decode, encode
from checkpointing.galois import isal

NAME = "erasure"
_ZFEC = "1.6.0.0"
_CODES = ((4, 1), (4, 2), (8, 2), (12, 4))
_TASKS = ("encode", "rebuild")
Seconds = dict[str, list[float]]  # by way
Ask = Callable[[str, int, int, str], float]


def run(quick: bool) -> list[Row]:
    """Quick: 32 MB, one code, once. In full: 384 MB, four codes, five times, after one that is not counted."""
    nbytes, codes, repeats = (32 << 20, _CODES[1:2], 1) if quick else (384 << 20, _CODES, 6)
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, _peers(Path(folder), nbytes) as (ask, missing):
        return [row for k, m in codes for row in _rows(k, m, nbytes, _in_turns(k, m, source, repeats, ask), missing)]


def _rows(k: int, m: int, nbytes: int, seconds: dict[str, Seconds], missing: str) -> Iterator[Row]:
    size = f"{nbytes / 1e6:.0f} MB"
    for task, done in (("encode", "encode"), ("rebuild", f"rebuild {m} of {k} shards of")):
        ours, runs = seconds[task]["isal"], seconds[task]
        figure = f"{k}+{m}: {done} {size}"
        yield compare(NAME, figure, ours, Peer(f"PyECLib {version('pyeclib')}{missing}", runs["pyeclib"]))
        yield compare(NAME, figure, ours, Peer(f"zfec {_ZFEC}{missing}", runs["zfec"]))
        yield compare(NAME, figure, ours, Peer("memcpy", runs["memcpy"]))
        if runs["numpy"]:
            yield compare(NAME, f"{figure}, numpy alone", runs["numpy"], Peer(f"zfec {_ZFEC}{missing}", runs["zfec"]))
    for task, way in (("encode", "isal"), ("rebuild", "isal"), ("shard by shard", "isal"), ("encode", "numpy")):
        if seconds[task][way]:
            speed = nbytes / 1e9 / statistics.median(seconds[task][way])
            yield own(NAME, f"{k}+{m}: {task}{', numpy alone' if way == 'numpy' else ''}", [speed], "GB/s of source")


def _in_turns(k: int, m: int, source: np.ndarray, repeats: int, ask: Ask | None) -> dict[str, Seconds]:
    """Seconds by task and way; the first time is left out where there are several."""
    assert isal() is not None
    length = len(source) // k
    data = [source[start * length : (start + 1) * length] for start in range(k)]
    parity, copied = [np.ones(length, np.uint8) for _ in range(m)], np.ones_like(source)
    seconds: dict[str, Seconds] = defaultdict(lambda: defaultdict(list))

    def ours(way: str) -> None:
        seconds["encode"][way].append(_timed(lambda: encode(data, parity)))
        left = {number: shard for number, shard in enumerate([*data, *parity]) if number >= m}
        rebuilt: list[np.ndarray] = []
        seconds["rebuild"][way].append(_timed(lambda: rebuilt.extend(decode(k, m, left, range(m)))))
        assert all(np.array_equal(*pair) for pair in zip(rebuilt, data[:m], strict=True))

    def shard_by_shard() -> None:
        for index, shard in enumerate(data):
            accumulate(k, m, index, shard, parity)

    for _ in range(repeats):
        ours("isal")
        seconds["shard by shard"]["isal"].append(_timed(shard_by_shard))
        if m <= 2:
            with mock.patch("checkpointing.erasure.isal", return_value=None):
                ours("numpy")
        for task in _TASKS:
            seconds[task]["memcpy"].append(_timed(lambda: np.copyto(copied, source)))
            for peer in ("pyeclib", "zfec") if ask else ():
                seconds[task][peer].append(ask(peer, k, m, task))
    return {
        task: defaultdict(list, {way: runs[-max(1, repeats - 1) :] for way, runs in ways.items()})
        for task, ways in seconds.items()
    }


def _timed(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@contextmanager
def _peers(folder: Path, nbytes: int) -> Iterator[tuple[Ask | None, str]]:
    """Install them into an environment of their own; yields how to measure with them, or None and why not."""
    python = str(folder / "bin" / "python")
    packages = [f"zfec=={_ZFEC}", *(f"{name}=={version(name)}" for name in ("pyeclib", "numpy"))]
    try:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        yield None, f", not measured: {error.stderr.decode(errors='replace').strip().splitlines()[-1]}"
        return
    script = Path(__file__).with_name("erasure_peers.py")
    with subprocess.Popen([python, script, str(nbytes)], stdin=-1, stdout=-1, text=True, cwd=folder) as process:

        def ask(*measurement: object) -> float:
            assert process.stdin is not None and process.stdout is not None
            print(json.dumps(measurement), file=process.stdin, flush=True)
            return float(process.stdout.readline())

        try:
            yield ask, ""
        finally:
            process.kill()
