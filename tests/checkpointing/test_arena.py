"""Shared memory between real processes, which are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from checkpointing.arena import Arena, ArenaAddress, ArenaLost, SlotRewritten
from checkpointing.node_memory import available_memory
from checkpointing.schema import Piece
from checkpointing.snapshot import digest_of, snapshot_nbytes, write_snapshot

NBYTES = 1 << 20
WRITER = """
import sys
from checkpointing.arena import *
arena = Arena.attach(eval(sys.argv[1]))
with arena.writing(0) as buffer:
    buffer[:] = 7
with arena.writing(1) as buffer:
    buffer[: buffer.size // 2] = 9
    print("half", flush=True)
    sys.stdin.read()
"""
OWNER = """
import sys
from checkpointing.arena import *
arena = Arena.create(1 << 20)
arena.slot(0)[:] = 5
print(arena.address, flush=True)
sys.stdin.read()
"""


def python(code: str, *args: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_keeper_keeps_the_bytes_of_a_killed_writer_and_knows_which_slot_is_torn() -> None:
    named = sorted(os.listdir("/dev/shm"))
    arena = Arena.create(NBYTES)
    writer = python(WRITER, repr(arena.address))
    assert writer.stdout.readline() == "half\n"
    kill(writer)
    assert (arena.slot(0) == 7).all() and arena.ticket(0) == 2
    assert arena.ticket(1) % 2 == 1
    with arena.writing(1) as buffer:  # the next writer is not disturbed by the dead one
        buffer[:] = 3
    assert arena.ticket(1) == 2
    assert sorted(os.listdir("/dev/shm")) == named
    arena.close()


def test_memory_goes_with_the_last_process_and_a_dead_owner_is_named() -> None:
    owner = python(OWNER)
    address = eval(owner.stdout.readline(), {"ArenaAddress": ArenaAddress})
    arena = Arena.attach(address)
    view = arena.slot(0)
    kill(owner)
    assert (view == 5).all()
    with pytest.raises(ArenaLost, match=f"process {address.pid} no longer holds its arena"):
        Arena.attach(address)
    arena.close()
    assert (view == 5).all(), "a view that was handed out stays valid"


def test_a_reused_descriptor_is_not_mistaken_for_the_arena() -> None:
    arena, other = Arena.create(4096), Arena.create(4096)
    forged = ArenaAddress(os.getpid(), other.address.fds, 4096, arena.address.token)
    with pytest.raises(ArenaLost):
        Arena.attach(forged)
    arena.close()
    other.close()


def test_nothing_is_left_open_or_allocated_after_close() -> None:
    fds, mapped = num_fds(), Path("/proc/self/maps").read_text().count("planaria-")
    for _ in range(20):
        arena = Arena.create(NBYTES)
        Arena.attach(arena.address).close()
        arena.close()
    del arena
    assert num_fds() == fds
    assert Path("/proc/self/maps").read_text().count("planaria-") == mapped


def test_pages_are_there_before_the_first_write() -> None:
    arena = Arena.create(64 << 20)
    assert all(os.fstat(fd).st_blocks * 512 >= 64 << 20 for fd in arena.address.fds)
    arena.close()


def test_a_slot_cannot_be_truncated_by_anyone() -> None:
    arena = Arena.create(NBYTES)
    for fd in arena.address.fds:
        with open(f"/proc/{arena.address.pid}/fd/{fd}", "r+b") as slot:  # as a worker opens it
            for size in (0, NBYTES, 4 * NBYTES):
                with pytest.raises(PermissionError):
                    os.truncate(slot.fileno(), size)
    arena.slot(1)[-1] = 1
    arena.close()


def test_more_than_the_node_has_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"needs \d+ bytes on this node but only \d+ are available"):
        Arena.create(1 << 50)


def test_a_leased_slot_is_not_rewritten() -> None:
    arena = Arena.create(4096)
    with arena.writing(0) as buffer:
        buffer[:] = 1
    entered, finished = threading.Event(), threading.Event()

    def rewrite() -> None:
        entered.set()
        with arena.writing(0) as buffer:
            buffer[:] = 2
        finished.set()

    thread = threading.Thread(target=rewrite)
    with arena.lease(0, ticket=2) as content:
        thread.start()
        entered.wait()
        while arena.ticket(0) == 2:  # until the writer has announced itself and waits
            pass
        with pytest.raises(SlotRewritten), arena.lease(0, ticket=2):
            pass
        assert not finished.is_set() and (content == 1).all()
    thread.join()
    assert (arena.slot(0) == 2).all()
    with arena.lease(0, ticket=4), pytest.raises(TimeoutError), arena.writing(0, timeout_s=0.01):
        pass
    arena.close()
    with pytest.raises(SlotRewritten), arena.lease(0, ticket=4):
        pass


def test_snapshots_are_aligned_digested_and_refused_when_too_large() -> None:
    state = {
        Piece("a", (0, 0), (3, 5)): np.arange(15, dtype=np.float32).reshape(5, 3).T,
        Piece("s", (), ()): np.array(7),
        Piece("b", (2,), (1,)): np.array([9], np.uint16),
    }
    buffer = np.zeros(snapshot_nbytes(state), np.uint8)
    records = write_snapshot(buffer, state)
    for record in records:
        array = state[record.piece]
        assert record.start % 64 == 0
        assert np.array_equal(record.array(buffer), array) and record.dtype == array.dtype.name
        assert record.digest == digest_of(np.ascontiguousarray(array))
    with pytest.raises(ValueError, match="needs 192 bytes but its slot has 191"):
        write_snapshot(buffer[:-1], state)


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (
            "0::/job/task\n",
            {"job/memory.max": "1000", "job/memory.current": "900", "job/memory.stat": "inactive_file 50"},
            150,
        ),
        ("0::/job\n", {"job/memory.max": "max", "job/memory.current": "900", "job/memory.stat": ""}, 4096),
        ("0::/seen/only/outside\n", {"memory.max": "10", "memory.current": "30", "memory.stat": ""}, 0),
        (
            "4:cpu,memory:/a\n0::/\n",
            {
                "memory/a/memory.limit_in_bytes": "300",
                "memory/a/memory.usage_in_bytes": "100",
                "memory/a/memory.stat": "total_inactive_file 7",
            },
            207,
        ),
        ("1:cpu:/\n", {}, 4096),
    ],
)
def test_available_memory_obeys_every_control_group(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8 kB\nMemAvailable:    4 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_memory(tmp_path / "proc", tmp_path / "cgroup") == expected
