"""The run folder: who may drive a run, and what is read back of what was written."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pyarrow.fs import LocalFileSystem

from checkpointing.arrow_storage import ArrowStorage
from checkpointing.storage import LocalStorage, Storage, open_storage
from orchestrator import lines as lines_module
from orchestrator.environment import PACKAGES
from orchestrator.lease import Lease, LeaseLost
from orchestrator.lines import FileLines, SegmentLines
from orchestrator.runfolder import RunFolder, RunRefused
from tests.object_server import ObjectServer
from tests.orchestrator.run_drivers import JOB, drive_forever, race

SPAWN = multiprocessing.get_context("spawn")


def folder(path: Path) -> RunFolder:
    return RunFolder(str(path), "run")


# -- the same name again


def test_a_new_run_writes_down_what_was_asked(tmp_path: Path) -> None:
    run = folder(tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is made before a driver has the run"
    got = run.acquire(JOB)
    assert (got.resumed, got.epoch, got.job.optimizer.decay_steps) == (False, 1, 5)
    assert RunFolder.open(str(tmp_path / "run")).read_job() == got.job
    environment = run.read_environment()
    assert environment["format"] == 1 and environment["seed"] == 0 and environment["versions"]["pydantic"]


def test_a_live_driver_is_not_disturbed(tmp_path: Path) -> None:
    folder(tmp_path).acquire(JOB)
    with pytest.raises(RunRefused, match=r"^run 'run' is being driven from .* [(]its lease ends in \d+ s"):
        folder(tmp_path).acquire(JOB, resume=True)


def test_an_unfinished_run_goes_on(tmp_path: Path) -> None:
    first = folder(tmp_path)
    first.acquire(JOB)
    first.request_stop()
    first.finish("stopped")
    second = folder(tmp_path)
    got = second.acquire(JOB.with_overrides(["scaling.num_workers=1", "training.max_steps=7"]))
    assert (got.resumed, got.same_code, got.epoch) == (True, True, 2)
    assert got.job.training.max_steps == 7 and got.job.decay_steps == 5, "the schedule stays as it was"
    assert got.message.startswith("resuming run 'run'") and got.message.endswith("(stopped)")
    assert not second.stop_requested(), "a request to stop was meant for the driver before"


def test_a_finished_run_needs_resume(tmp_path: Path) -> None:
    first = folder(tmp_path)
    first.acquire(JOB)
    first.append_metrics({"step": 5, "generation": 1, "total_tokens": 100})
    first.finish("finished")
    with pytest.raises(
        RunRefused, match=r"is finished, at step 5; use --resume with a later end .* or choose a new run.name$"
    ):
        folder(tmp_path).acquire(JOB)
    with pytest.raises(RunRefused, match=r"is finished, at step 5; use --resume with a later end"):
        folder(tmp_path).acquire(JOB, resume=True)
    assert folder(tmp_path).acquire(JOB.with_overrides(["training.max_steps=9"]), resume=True).resumed


@pytest.mark.parametrize("resume", [False, True])
def test_another_jobs_run_is_refused_by_key(tmp_path: Path, resume: bool) -> None:
    first = folder(tmp_path)
    first.acquire(JOB)
    first.finish("stopped")
    other = JOB.with_overrides(["data.seq_len=64", "optimizer.lr=1e-4", "layout=dp2"])
    differing = "data.seq_len, optimizer.lr; choose a new run.name, or put these back"
    with pytest.raises(RunRefused, match=f"another job, which differs in {differing}"):
        folder(tmp_path).acquire(other, resume=resume)
    assert first.read_job() == JOB.resolved()


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(RunRefused, match=r"^there is no run to resume in .*; leave --resume out to start one$"):
        folder(tmp_path).acquire(JOB, resume=True)
    with pytest.raises(RunRefused, match=r"^there is no run in "):
        RunFolder.open(str(tmp_path / "run"))


# -- the lease


def test_of_rivals_one_drives(tmp_path: Path) -> None:
    barrier, results = SPAWN.Barrier(4), SPAWN.Queue()
    rivals = [SPAWN.Process(target=race, args=(str(tmp_path), barrier, results)) for _ in range(4)]
    for rival in rivals:
        rival.start()
    assert sorted((results.get(timeout=60) for _ in rivals), key=str) == [1, None, None, None]
    for rival in rivals:
        rival.join(timeout=60)


def test_a_killed_driver_of_this_host_is_followed_at_once(tmp_path: Path) -> None:
    ready = SPAWN.Queue()
    driver = SPAWN.Process(target=drive_forever, args=(str(tmp_path), ready))
    driver.start()
    assert ready.get(timeout=60)
    with pytest.raises(RunRefused, match="is being driven"):
        folder(tmp_path).acquire(JOB)
    assert driver.pid is not None
    os.kill(driver.pid, signal.SIGKILL)
    driver.join()
    run = folder(tmp_path)
    assert run.acquire(JOB).resumed
    assert run.read_metrics() == [{"format": 1, "step": 1, "generation": 1, "loss": 3.0}]


def _edit_lease(path: Path, **fields: Any) -> None:
    lease = sorted((path / "run" / "lease").iterdir())[-1]
    lease.write_text(json.dumps({**json.loads(lease.read_text()), **fields}))


def test_a_driver_elsewhere_is_believed_until_its_lease_ends(tmp_path: Path) -> None:
    folder(tmp_path).acquire(JOB)
    _edit_lease(tmp_path, owner="elsewhere:1:0.00")
    with pytest.raises(RunRefused, match="is being driven"):
        folder(tmp_path).acquire(JOB)
    _edit_lease(tmp_path, expires=time.time() - 1)
    assert folder(tmp_path).acquire(JOB).epoch == 2


def test_a_driver_whose_folder_is_taken_away(tmp_path: Path) -> None:
    driver = folder(tmp_path)
    driver.acquire(JOB)
    shutil.rmtree(tmp_path)
    assert driver._lease is not None
    object.__setattr__(driver._lease, "expires", 0.0)
    with pytest.raises(LeaseLost, match="the run's folder was taken away while its driver was at work"):
        driver.renew()


def test_an_older_driver_is_fenced(tmp_path: Path) -> None:
    older, newer = folder(tmp_path), folder(tmp_path)
    older.acquire(JOB)
    _edit_lease(tmp_path, expires=0)
    newer.acquire(JOB)
    assert older._lease is not None
    object.__setattr__(older._lease, "expires", 0.0)  # the pause in which it lost the run
    with pytest.raises(LeaseLost):
        older.renew()
    with pytest.raises(LeaseLost):
        older.finish("finished")
    newer.renew()
    newer.finish("finished")
    assert newer.lease is not None and newer.lease.status == "finished"


def test_renewal_moves_the_expiry_and_is_cheap_until_it_is_due(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.acquire(JOB.with_overrides(["orphan_grace_s=4"]))
    first = run._lease
    assert first is not None and first.ttl_s == 2
    run.renew()
    assert run._lease is first, "not due"
    object.__setattr__(first, "expires", time.time() + 1)
    run.renew()
    assert run._lease is not None and run._lease.expires > time.time() + 1.5


# -- what is written is read back


def _arrow_storage(path: Path) -> ArrowStorage:
    """The storage of what is neither local nor S3, on top of pyarrow's local file system."""
    return ArrowStorage(LocalFileSystem(), str(path), f"file://{path}")


@pytest.mark.parametrize("make", [LocalStorage, _arrow_storage])
def test_storage(tmp_path: Path, make: Callable[[Path], Storage]) -> None:
    storage = make(tmp_path / "x")
    assert storage.read("a") is None and storage.names("d") == []
    storage.write("a", b"1")
    storage.write("a", b"2")
    assert storage.read("a") == b"2"
    assert storage.create("d/2", b"x") and not storage.create("d/2", b"y") and storage.create("d/1", b"z")
    assert storage.read("d/2") == b"x" and storage.names("d") == ["d/1", "d/2"]
    storage.remove("a")
    storage.remove("a")
    assert storage.read("a") is None


def test_drafts_of_killed_writers_are_swept(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    dead = SPAWN.Process(target=os.getpid)
    dead.start()
    dead.join()
    mine, left = tmp_path / f".stop.{os.getpid()}.tmp", tmp_path / f".job.yaml.{dead.pid}.tmp"
    mine.touch()
    left.touch()
    storage.sweep()
    assert mine.exists() and not left.exists()


def test_a_torn_line_is_left_out_and_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    log = FileLines(LocalStorage(tmp_path), "log")
    assert [line["step"] for line in log.read()] == [1]
    log.append({"step": 2})
    assert [line["step"] for line in log.read()] == [1, 2]


def test_segments_read_as_one_log_also_after_a_new_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = _arrow_storage(tmp_path)
    first, second = SegmentLines(storage, "log"), SegmentLines(storage, "log")
    for number in range(3):
        first.append({"n": number})
    assert storage.names("log") == [], "lines wait a few seconds"
    first.flush(force=True)
    monkeypatch.setattr(lines_module, "_SEGMENT_S", 0.0)
    second.append({"n": 3})
    second.flush()
    first.append({"n": 4})
    first.flush()  # an older driver that still writes takes no segment of the newer one
    assert storage.names("log") == [f"log/0000000{number}.jsonl" for number in range(3)]
    assert [line["n"] for line in second.read()] == [0, 1, 2, 3, 4]


def test_lines_wait_for_a_store_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = _arrow_storage(tmp_path)
    log = SegmentLines(storage, "log")
    with monkeypatch.context() as away:

        def create(name: str, data: bytes) -> bool:
            raise OSError(errno.EIO, "Could not connect")

        away.setattr(storage, "create", create)
        log.append({"n": 0})
        with pytest.raises(OSError, match="Could not connect"):
            log.flush(force=True)
        log.append({"n": 1})
    log.flush(force=True)
    assert [line["n"] for line in log.read()] == [0, 1]


def test_a_step_that_ran_again_counts_with_its_last_generation(tmp_path: Path) -> None:
    run = folder(tmp_path)
    for step, generation in [(1, 1), (2, 1), (3, 1), (2, 2), (3, 3), (3, 2), (4, 3)]:
        run.append_metrics({"step": step, "generation": generation})
    assert [(line["step"], line["generation"]) for line in run.read_metrics()] == [(1, 1), (2, 2), (3, 3), (4, 3)]


@pytest.mark.parametrize("name", ["job.yaml", "plan.json", "environment.json", "lease/00000001.json"])
@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[1]"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    run = folder(tmp_path)
    run.acquire(JOB)
    run.finish("stopped")
    (tmp_path / "run" / name).write_bytes(content)
    with pytest.raises(RunRefused, match=name.partition("/")[0]) as caught:
        folder(tmp_path).acquire(JOB)
        folder(tmp_path).read_plans()
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (LocalStorage(tmp_path).write, LocalStorage(tmp_path).create):
        with pytest.raises(OSError, match="No space left on device: '.*/file'"):
            write("file", b"data")
    assert not list(tmp_path.iterdir())


def test_plans_are_kept_by_generation(tmp_path: Path) -> None:
    run = folder(tmp_path)
    for generation in (1, 2, 10):
        run.write_plan(generation, {"layout": f"dp{generation}"})
    assert run.read_plans() == {generation: {"layout": f"dp{generation}"} for generation in (1, 2, 10)}
    assert list(run.read_plans()) == [1, 2, 10]


def test_a_probe_is_a_file_for_as_long_as_it_is_needed(tmp_path: Path) -> None:
    with folder(tmp_path).probe() as path:
        assert os.path.isfile(path)
    assert not os.path.exists(path)


def test_the_environment_names_neither_host_nor_user(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.acquire(JOB)
    text = (tmp_path / "run" / "environment.json").read_text()
    assert os.uname().nodename not in json.loads(text).values() and str(Path.home()) not in text
    assert set(PACKAGES) == {"checkpointing", "orchestrator", "pipelines", "workers"}


# -- S3


def test_a_run_on_s3(object_server: ObjectServer) -> None:
    """Driven, stopped, taken over and read back there; its logs are numbered segments."""
    path = object_server.url(f"runs-{secrets.token_hex(4)}")
    first, reader = RunFolder(path, "run"), RunFolder(path, "run")
    assert not first.is_local and first.location("checkpoints").startswith(path.partition("?")[0] + "/run/checkpoints?")
    assert not first.acquire(JOB).resumed
    with pytest.raises(RunRefused, match="is being driven from"):
        reader.acquire(JOB)
    for step in range(1, 4):
        first.append_metrics({"step": step, "generation": 1, "loss": 1.0 / step})
        first.flush(force=True)
    first.append_event({"kind": "state"})
    first.write_plan(1, {"layout": "dp2"})
    assert [line["step"] for line in reader.read_metrics()] == [1, 2, 3]
    assert reader.read_plans() == {1: {"layout": "dp2"}}
    reader.request_stop()
    assert first.stop_requested()
    first.finish("stopped")
    keys = {key.partition("/run/")[2] for key in object_server.objects(urlsplit(path).path.strip("/"))}
    assert {"job.yaml", "lease/00000001.json", "events/00000000.jsonl"} <= keys
    assert {f"metrics/0000000{number}.jsonl" for number in range(3)} <= keys
    again = RunFolder.open(first.url)
    got = again.acquire(JOB)
    assert (got.resumed, got.epoch, again.stop_requested()) == (True, 2, False)
    first._lease = Lease(1, "somebody:1:1", "host", 0.0, 1.0)
    with pytest.raises(LeaseLost):
        first.renew()
    again.discard()
    assert object_server.objects(urlsplit(path).path.strip("/")) == {}


def test_one_of_two_rivals_creates_on_s3(object_server: ObjectServer) -> None:
    storages = [open_storage(object_server.url(f"rivals-{secrets.token_hex(4)}")) for _ in range(1)] * 8
    start = threading.Barrier(len(storages))

    def create(number: int) -> bool:
        start.wait()
        return storages[number].create("lease/1", str(number).encode())

    with ThreadPoolExecutor(len(storages)) as pool:
        won = list(pool.map(create, range(len(storages))))
    assert won.count(True) == 1 and storages[0].read("lease/1") == str(won.index(True)).encode()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("s3://", "names no bucket; write s3://bucket/prefix"),
        ("s3:///prefix", "names no bucket"),
        ("s3://key:secret@bucket/x", "must not hold credentials"),
        ("s3://bucket/x?endpont_override=localhost", "has the unknown option 'endpont_override'"),
        ("gopher://bucket/x", "cannot be used"),
    ],
)
def test_a_location_that_cannot_be_is_refused(path: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        RunFolder(path, "run")
    assert "secret" not in str(caught.value)


def test_a_store_that_says_no_is_named(object_server: ObjectServer) -> None:
    elsewhere = object_server.url("x").replace("s3://bucket/", "s3://no-such-bucket-here/")
    with pytest.raises(OSError, match="NoSuchBucket") as caught:
        open_storage(elsewhere).read("a")
    assert caught.value.filename == "s3://no-such-bucket-here/x/a" and "\n" not in str(caught.value)
