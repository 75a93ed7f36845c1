"""The benchmarks themselves: rows, how incidents are read from a job's lines, the same input for both sides."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import erasure, incidents, recovery, reshard, restore, snapshot, workload
from benchmarks.incidents import Join, Measured, Recovery
from benchmarks.jobs import Job, Lines, running, step_times
from benchmarks.rows import Peer, Row, compare, own, table
from orchestrator.ledger import PHASES
from pipelines.batches import BatchBuilder, Cursor
from pipelines.corpus import Corpus
from pipelines.tokenizer import train_or_load

_seconds = st.floats(1e-3, 1e3)


@given(st.lists(_seconds, min_size=1, max_size=7), st.lists(_seconds, max_size=7))
def test_a_row_is_plain_json_and_its_ratio_favours_the_lower(ours: list[float], other: list[float]) -> None:
    row = compare("name", "figure", ours, Peer("peer", other))
    assert json.loads(json.dumps(row)) == row
    assert set(row) == set(Row.__annotations__)
    assert min(ours) * 0.999 <= row["ours"] <= max(ours) * 1.001
    if not other:
        assert row["other"] is None and row["ratio"] is None
    else:
        assert row["ratio"] == pytest.approx(np.median(other) / np.median(ours), rel=1e-3, abs=1e-3)


def test_a_table_shows_medians_with_their_spread_and_why_a_peer_is_missing() -> None:
    rows = [
        compare("x", "first", [1.0, 3.0, 2.0], Peer("peer", [30.0, 40.0])),
        compare("x", "second", [1.0], Peer("peer, not measured: it does not install")),
        own("x", "third", [0.5]),
    ]
    lines = table(rows).splitlines()[2:]
    assert lines[0] == "| first | 2 s (1 to 3) | 35 s (30 to 40) | peer | 17.50 | 3 / 2 |"
    assert lines[1] == "| second | 1 s |  | peer, not measured: it does not install |  | 1 |"
    assert lines[2] == "| third | 0.5 s |  |  |  | 1 |"


def test_recovery_gives_the_same_figures_with_and_without_the_peer() -> None:
    phases = dict.fromkeys(PHASES, 0.1)
    ours = Measured([Recovery(1.0, 1.5, 0, phases)] * 3, [Recovery(2.0, 2.0, 1, phases)], [Join(0.2, 9.0, 0)], [0.5])
    theirs = Measured([Recovery(20.0, 30.0, 7, {})], [Recovery(80.0, 90.0, 4, {})], [Join(25.0, 60.0, 2)], [0.5])
    rows = recovery._rows("r8", ours, theirs, "")
    alone = recovery._rows("r8", ours, Measured([], [], [], []), ", not measured: why")
    assert [row["figure"] for row in rows] == [row["figure"] for row in alone]
    assert rows[0]["ratio"] == 20.0 and rows[0]["runs"] == {"ours": [1.0] * 3, "other": [20.0]}
    assert alone[0]["other"] is None and alone[0]["other_name"].endswith("not measured: why")


def test_reshard_compares_the_same_moves_and_leaves_the_first_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ("ours", "snapshot", "plan", "load", "dcp", "dcp save", "dcp load", "group", "memcpy", "memcpy shared")
    asked = []

    def measure(folder: Path, moves: tuple[str, ...], repeats: int) -> dict[str, Any]:
        asked.append(repeats)
        runs = {way: [9.0, *[0.25 if way.startswith("dcp") else 0.05] * (repeats - 1)] for way in ways}
        return {"seconds": dict.fromkeys(moves, runs), "staged": 64e6}

    monkeypatch.setattr(reshard, "_measure", measure)
    quick, full = reshard.run(quick=True), reshard.run(quick=False)
    assert asked == [2, 8] and len(full) - 1 == 3 * (len(quick) - 1)
    assert quick[0]["ratio"] == full[0]["ratio"] == 5.0 and quick[-1]["ours"] == 64.0


@pytest.mark.parametrize("missing", ["", ", not measured: no network"])
def test_erasure_measures_ours_with_and_without_the_peers(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def peers(folder: Path, nbytes: int) -> Iterator[tuple[erasure.Ask | None, str]]:
        yield (None if missing else lambda way, k, m, task: 1e6), missing

    monkeypatch.setattr(erasure, "_peers", peers)
    rows = erasure.run(quick=True)
    of_peers = [row for row in rows if row["other_name"].startswith(("zfec", "PyECLib"))]
    assert len(of_peers) == 6 and all(row["ours"] for row in rows)
    for row in of_peers:
        assert row["other_name"].endswith("no network") if missing else row["ratio"] > 1000


def test_snapshot_compares_stalls_and_what_steps_take_longer() -> None:
    of = {"off": (1.0, 0.0), "loop": (1.1, 0.0), "ours": (1.1, 0.011), "dcp": (1.6, 0.22)}
    rows = snapshot._rows({way: [snapshot.Run(*run)] * 3 for way, run in of.items()})
    assert [row["ratio"] for row in rows] == [20.0, None, 5.0, 1.1]
    assert rows[1]["ours"] == 1.0 and rows[1]["unit"] == "%"


def test_restore_compares_memory_with_each_place_of_the_peer() -> None:
    of = {"here": 0.1, "elsewhere": 0.5, "tmpfs": 1.0, "disk, cached": 1.5, "disk": 3.0, "memcpy": 0.05, "plan": 0.01}
    rows = restore._rows({way: [seconds] * 3 for way, seconds in of.items()}, 480_000_000)
    assert [row["ratio"] for row in rows] == [10.0, 15.0, 30.0, 0.5, 2.0, 3.0, 6.0, 0.1, None]


def test_lines_are_read_once_and_only_when_whole(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "lines.jsonl")
    assert lines.read() == []
    lines.path.write_bytes(b'{"time": 1}\n{"ti')
    assert lines.read() == [{"time": 1}]
    with lines.path.open("ab") as file:
        file.write(b'me": 3}\n')
    assert lines.read() == [{"time": 1}, {"time": 3}]
    assert step_times([*lines.read(), {"time": 4}], 1) == [1]


class _Scripted:
    """A system whose job does nothing: the test writes its lines."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def pid(self, rank: int) -> int:
        raise AssertionError

    def wait_until_warm(self) -> None:
        raise AssertionError

    def phases(self, killed: float) -> dict[str, float]:
        return {}

    def write(self, *lines: dict[str, Any]) -> None:
        with self.job.steps.path.open("a") as file:
            file.writelines(json.dumps({"world_size": 8, **line}) + "\n" for line in lines)


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[_Scripted]:
    with running(["sleep", "300"], tmp_path / "job", {}, "steps.jsonl", "events.jsonl") as job:
        yield _Scripted(job)


def test_a_death_is_timed_from_the_signal_to_the_first_step_of_a_later_generation(
    scripted: _Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "next_steps", lambda job, count: job.steps.read()[-count:])
    scripted.write({"time": 1.0, "step": 11, "generation": 1})
    struck: list[float] = []

    def strike() -> None:
        now = time.time()
        struck.append(now)
        scripted.write(
            {"time": now + 0.1, "step": 12, "generation": 1},  # was under way and is committed after the signal
            {"time": now + 20, "step": 10, "generation": 2},
            {"time": now + 21, "step": 11, "generation": 2},
            {"time": now + 22, "step": 12, "generation": 2},
            {"time": now + 23, "step": 13, "generation": 2},
        )

    seen = incidents._struck(scripted, 0.0, strike)
    assert seen.seconds == pytest.approx(20, abs=0.1) and seen.regained == pytest.approx(23, abs=0.1)
    assert seen.again == 3


def test_a_job_that_ends_early_is_told_with_its_last_lines(tmp_path: Path) -> None:
    with (
        running(["sh", "-c", "echo so it ends; exit 3"], tmp_path, {}, "steps.jsonl", "events.jsonl") as job,
        pytest.raises(RuntimeError, match="so it ends"),
    ):
        job.next_steps(1)


def test_peers_get_the_rows_that_our_readers_deal(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for index in range(20):
        (tmp_path / "text" / f"{index}.txt").write_text(f"line {index} of a text that repeats itself\n" * 60)
    job = workload.job(3, ["dp3"], data={"text": str(tmp_path / "text"), "vocab_size": 320})
    workload.write_batches(job, tmp_path / "batches.npy", 3)
    stored = np.load(tmp_path / "batches.npy")
    corpus = Corpus.open(job.data.text)
    builder = BatchBuilder(corpus, train_or_load(corpus, 320), job.data, job.training.global_batch_rows, 0)
    cursor = Cursor()
    for step in range(1, 4):
        batch = builder.batch(cursor)
        for rank in range(3):
            ours, theirs = batch.for_rank(3, rank, 2), workload.read_batch(stored, step, 3, rank, 2)
            assert ours.num_valid == theirs.num_valid
            for name in ("tokens", "targets", "positions", "segments"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        cursor = batch.next
