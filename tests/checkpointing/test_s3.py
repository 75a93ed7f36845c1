"""Multipart uploads on a real server: in parts, through the death of server and writer, leaving nothing unfinished."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checkpointing import s3
from checkpointing.publish import begin, list_checkpoints, sweep
from checkpointing.storage import check_reachable, open_storage, unpaced
from orchestrator.cli import main
from orchestrator.cli_parts import reach
from tests.object_server import ObjectServer

PART = 5 << 20  # S3 takes no smaller ones


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_PART_NBYTES", PART)
    monkeypatch.setattr(s3, "_PARTS_FROM_NBYTES", PART)


def buffers(num_parts: float) -> list[np.ndarray]:
    """Random bytes for so many parts, in buffers whose ends are not the parts' ends."""
    data = np.frombuffer(np.random.default_rng(0).bytes(int(num_parts * PART)), np.uint8)
    return np.split(data, [7, 8, data.size // 3, data.size // 3 + 1])


def test_a_large_file_goes_up_in_parts_and_comes_back_in_ranges(object_server: ObjectServer) -> None:
    storage, paced = open_storage(object_server.url("parts")), []
    storage.upload("a/large", buffers(3.3), paced.append)
    whole = np.concatenate(buffers(3.3))
    assert [*paced[:3], sum(paced)] == [PART, PART, PART, whole.size]
    assert object_server.client().head_object(Bucket="bucket", Key="parts/a/large")["ETag"].endswith('-4"')
    assert storage.sizes("") == {"a/large": whole.size} and object_server.unfinished_uploads() == []
    for start, nbytes in [(0, 1), (PART - 1, 2), (whole.size - 3, 3), (17, 2 * PART)]:
        assert storage.read_range("a/large", start, nbytes).tobytes() == whole[start : start + nbytes].tobytes()
    assert storage.read_range("a/large", whole.size - 2, 100).size == 2
    assert storage.read_range("a/large", whole.size + 5, 1).size == 0
    with pytest.raises(FileNotFoundError):
        storage.read_range("a/none", 0, 1)


def test_the_server_dies_and_comes_back_in_mid_upload(object_server: ObjectServer) -> None:
    storage, so_far = open_storage(object_server.url("restart")), []

    def pace(nbytes: int) -> None:
        so_far.append(nbytes)
        if len(so_far) == 3:
            object_server.kill()
            object_server.start()

    storage.upload("large", buffers(5.5), pace)
    assert storage.read("large") == np.concatenate(buffers(5.5)).tobytes()
    assert object_server.unfinished_uploads() == [] and list(storage.sizes("")) == ["large"]


def test_a_store_may_stay_away_for_half_a_minute(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits between the tries of one request; also many failed requests leave the next one all its tries."""
    monkeypatch.setattr(s3, "_client", s3._client.__wrapped__)
    storage = open_storage(object_server.url("away"))
    object_server.kill()
    random.seed(0)
    for _ in range(8):
        waits: list[float] = []
        monkeypatch.setattr("botocore.endpoint.time.sleep", waits.append)
        with pytest.raises(OSError, match="Could not connect"):
            storage.read("large")
        assert len(waits) == s3._MOST_TRIES - 1 and sum(waits) > 30
    object_server.start()


def test_a_command_does_not_wait_for_a_store_where_nobody_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(s3, "_FIRST_ANSWER_S", 0.2)
    options = "scheme=http&region=us-east-1&endpoint_override=127.0.0.1"
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        url = f"s3://bucket/run?{options}:{port}"
        for command in (["checkpoint", "verify", url], ["checkpoint", "diff", url, url], ["status", url]):
            assert main(command) == 1
            assert f'Could not connect to the endpoint URL: "http://127.0.0.1:{port}/' in capsys.readouterr().err
        silent.listen()  # and never answers
        with pytest.raises(TimeoutError, match=f"waiting for http://127.0.0.1:{port}, which does not answer yet"):
            check_reachable(url)
        reach(url)
        assert capsys.readouterr().err == f"planaria: waiting for http://127.0.0.1:{port}, which does not answer yet\n"


def test_a_store_that_refuses_is_reached(object_server: ObjectServer) -> None:
    check_reachable(object_server.url("any"))
    check_reachable(object_server.url("any").replace("s3://bucket/", "s3://no-such-bucket/"))


def test_an_upload_that_fails_is_aborted_at_the_next_start(
    object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stays away for longer than all retries take."""
    monkeypatch.setattr(s3, "_MOST_TRIES", 2)
    monkeypatch.setattr(s3, "_client", s3._client.__wrapped__)
    directory = object_server.url("away")
    attempt, so_far = begin(directory, 1), []

    def pace(nbytes: int) -> None:
        so_far.append(nbytes)
        if len(so_far) == 2:
            object_server.kill()

    with pytest.raises(OSError, match="Could not connect"):
        open_storage(attempt.url).upload("data/large", buffers(3.5), pace)
    object_server.start()
    assert object_server.unfinished_uploads() == [
        f"{attempt.url.partition('?')[0].removeprefix('s3://bucket/')}/data/large"
    ]
    sweep(directory)
    assert object_server.unfinished_uploads() == [] and object_server.objects("away") == {}
    assert list_checkpoints(directory) == []


WRITER = """
import sys, time
from checkpointing import s3
from checkpointing.storage import open_storage
from tests.checkpointing.test_s3 import PART, buffers
s3._PART_NBYTES = s3._PARTS_FROM_NBYTES = PART
def pace(nbytes, so_far=[]):
    so_far.append(nbytes)
    if len(so_far) == 3:
        print("ready", flush=True)
        time.sleep(600)
open_storage(sys.argv[1]).upload("data/large", buffers(4.5), pace)
"""


@pytest.mark.parametrize("listed", [True, False], ids=["listed by the store", "by our own notes"])
def test_a_writer_that_is_killed_leaves_no_upload_behind(
    object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    directory = object_server.url("killed")
    attempt = begin(directory, 1)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, attempt.url], stdout=subprocess.PIPE, cwd=Path.cwd())
    assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    assert len(object_server.unfinished_uploads()) == 1
    if not listed:  # a store that lists uploads for a whole key only, as some do
        monkeypatch.setattr(s3.S3Storage, "_listed_uploads", lambda storage, folder: [])
    sweep(directory)
    assert object_server.unfinished_uploads() == [] and object_server.objects("killed") == {}


def test_encryption_is_asked_for(object_server: ObjectServer) -> None:
    storage = open_storage(object_server.url("secret") + "&sse=AES256")
    storage.write("small", b"x")
    storage.upload("large", buffers(1.5), unpaced)
    assert storage.create("new", b"x")
    for name in ("small", "large", "new"):
        head = object_server.client().head_object(Bucket="bucket", Key=f"secret/{name}")
        assert head["ServerSideEncryption"] == "AES256"
    assert storage.read("large") == np.concatenate(buffers(1.5)).tobytes()
