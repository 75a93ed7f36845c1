"""Checkpoints, on a local disk, on a real S3 server and through pyarrow: any layout reads them back."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow.fs import LocalFileSystem

from checkpointing import arrow_storage, durable
from checkpointing.arena import Arena
from checkpointing.boxes import describe
from checkpointing.checkpoint_file import record_of
from checkpointing.cover import StateLost, newest_complete
from checkpointing.holding import DigestMismatch, HoldingGone
from checkpointing.layout import Layout
from checkpointing.publish import begin, give_up, list_checkpoints, remove, step_of, sweep
from checkpointing.schema import pieces
from checkpointing.shares import plan_shares
from checkpointing.storage import LocalStorage, open_storage, split
from checkpointing.transfer import Destination, plan_transfer
from tests.checkpointing.node_keepers import TINY, Nodes, cut, random_reference, save_checkpoint

SAVED_UNDER = Layout.parse("dp2·tp2·pp2")
Place = Callable[[], str]


@pytest.fixture(params=["local", "s3", "pyarrow"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Gives a new, empty directory each time."""
    if request.param == "s3":
        server = request.getfixturevalue("object_server")
        return lambda: server.url(f"{secrets.token_hex(4)}/checkpoints")
    if request.param == "pyarrow":

        def open_arrow(url: str) -> arrow_storage.ArrowStorage:
            return arrow_storage.ArrowStorage(LocalFileSystem(), url.removeprefix("other:/"), url)

        monkeypatch.setattr(arrow_storage, "open_arrow_storage", open_arrow)
        return lambda: f"other:/{tmp_path}/{secrets.token_hex(4)}"
    return lambda: str(tmp_path / secrets.token_hex(4))


def save(directory: str, step: int, layout: Layout = SAVED_UNDER) -> str:
    return save_checkpoint(directory, step, layout)


def load(checkpoint: str, layout: Layout, step: int) -> None:
    """Load every rank of ``layout`` and compare every bit."""
    holdings = durable.checkpoint_holdings(checkpoint)
    assert newest_complete(TINY, holdings) == (1, step)
    destinations = {rank: Destination(f"n{rank}", pieces(TINY, layout, rank)) for rank in range(layout.size)}
    plan = plan_transfer(TINY, holdings, destinations)
    reference = random_reference(TINY, step)
    assert plan.tier == ("disk" if isinstance(open_storage(checkpoint), LocalStorage) else "s3")
    assert plan.bytes_moved == sum(cut(reference, p).nbytes for d in destinations.values() for p in d.pieces)
    for rank, destination in destinations.items():
        Nodes("a").load(plan, rank, destination, reference)


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(
    before=st.builds(Layout, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    after=st.builds(Layout, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
)
def test_any_layout_reads_what_any_layout_wrote(place: Place, before: Layout, after: Layout) -> None:
    checkpoint = save(place(), 7, before)
    assert durable.verify(checkpoint, deep=True) == ()
    load(checkpoint, after, 7)


def test_every_box_is_written_once_and_the_nodes_share_the_work() -> None:
    nodes = Nodes("abcd")
    nodes.protect(TINY, random_reference(TINY, 1), Layout.parse("r4"), "abcd")
    shares = plan_shares(TINY, nodes.inventory("abcd"))
    assert list(shares) == list("abcd")
    written = [share.record.piece for node in shares for share in shares[node]]
    assert sorted(written) == sorted(pieces(TINY, Layout(), 0))
    nbytes = [sum(share.record.nbytes for share in shares[node]) for node in shares]
    assert max(nbytes) - min(nbytes) <= max(share.record.nbytes for node in shares for share in shares[node])
    with pytest.raises(StateLost, match=r"the state is lost: nobody holds embed\.weight"):
        plan_shares(TINY, [])
    nodes.close()


def test_missing_and_cut_files_are_named_and_the_next_older_checkpoint_is_taken(place: Place) -> None:
    directory = place()
    old, middle, new = save(directory, 1), save(directory, 2), save(directory, 3)
    open_storage(directory).write("step-00000004", b"a file is no checkpoint")
    assert list_checkpoints(directory) == [old, middle, new]
    assert durable.newest_verified(directory) == (new, ())
    gone = durable.read_manifest(new)["files"][0]["file"]
    open_storage(new).remove(gone)
    with pytest.raises(HoldingGone, match=gone.rpartition("/")[2]):
        load(new, Layout(), 3)
    cut_off = durable.read_manifest(middle)["files"][-1]["file"]
    open_storage(middle).write(cut_off, (open_storage(middle).read(cut_off) or b"")[:100])
    found, problems = durable.newest_verified(directory, deep=False)
    assert found == old and len(problems) == 2
    assert f"{gone} is missing" in problems[0]
    assert f"{cut_off} has 100 bytes instead of" in problems[1]
    open_storage(old).remove("COMMITTED")
    found, problems = durable.newest_verified(directory)
    assert found is None and "COMMITTED is missing" in problems[-1]


def test_a_manifest_whose_boxes_overlap_or_have_another_dtype_is_not_verified(tmp_path: Path) -> None:
    """A manifest that is whole, but was made by something that is not."""
    checkpoint = Path(save(str(tmp_path), 5))
    manifest = durable.read_manifest(str(checkpoint))
    wrong = manifest["files"][0]["pieces"][0]
    manifest["files"][-1]["pieces"] += [{**wrong, "dtype": "int16"}]
    text = json.dumps(manifest).encode()
    (checkpoint / "manifest.json").write_bytes(text)
    (checkpoint / "COMMITTED").write_bytes(durable._mark(text))
    (problem,) = durable.verify(str(checkpoint), deep=False)
    assert "has dtype int16" in problem and describe(record_of(wrong).piece) in problem
    assert manifest["files"][-1]["file"] in problem


def test_a_committed_step_is_never_written_into(place: Place) -> None:
    directory = place()
    checkpoint = save(directory, 5)
    storage = open_storage(checkpoint)
    before = {name: storage.read(name) for name in storage.sizes("")}
    assert save(directory, 5, Layout.parse("dp3")) == checkpoint
    assert list_checkpoints(directory) == [checkpoint]
    file = next(name for name in before if name.endswith(".safetensors"))
    before[file] = (before[file] or b"")[:-1]
    storage.write(file, before[file] or b"")
    second = save(directory, 5, Layout.parse("dp3"))
    assert split(second)[1].startswith("step-00000005.") and step_of(second) == 5
    assert {name: storage.read(name) for name in storage.sizes("")} == before, "the damaged one stays as it is"
    assert list_checkpoints(directory) == [checkpoint, second]
    assert durable.newest_verified(directory) == (second, ())
    load(second, SAVED_UNDER, 5)


def test_an_incomplete_attempt_is_not_committed_and_cleaned_away(place: Place) -> None:
    directory = place()
    nodes = Nodes("ab")
    nodes.protect(TINY, random_reference(TINY, 1), Layout.parse("dp2"), "ab")
    holdings = nodes.inventory("ab")
    attempt = begin(directory, 1)
    shares = plan_shares(TINY, holdings)
    files = nodes.keepers["a"].write_durable(1, 1, attempt.url, shares["a"])
    with pytest.raises(StateLost, match="nobody holds"):
        durable.commit(attempt, TINY, holdings[0].snapshot, files)
    files += nodes.keepers["b"].write_durable(1, 1, attempt.url, shares["b"])
    open_storage(attempt.url).remove(files[0]["file"])
    with pytest.raises(OSError, match=f"{files[0]['file']} has no bytes where {files[0]['nbytes']} were written"):
        durable.commit(attempt, TINY, holdings[0].snapshot, files)
    record = shares["b"][0].record
    record.data(Arena.attach(shares["b"][0].holding.locator).slot(1))[0] ^= 1
    with pytest.raises(DigestMismatch, match="primary of rank 1 on node b"):
        nodes.keepers["b"].write_durable(1, 1, attempt.url, shares["b"])
    assert list_checkpoints(directory) == []
    sweep(directory)
    other = begin(directory, 2)
    open_storage(other.url).write("data/half", b"half")
    assert all("step-00000002" in name for name in open_storage(directory).sizes(""))
    give_up(other)
    assert open_storage(directory).sizes("") == {}
    nodes.close()


def test_what_a_writer_adds_that_does_not_know_its_end_is_swept(place: Place) -> None:
    directory = place()
    checkpoint, attempt = save(directory, 1), begin(directory, 2)
    sweep(directory)  # another driver has begun
    open_storage(attempt.url).upload("data/late.safetensors", [np.zeros(10, np.uint8)])
    assert list_checkpoints(directory) == [checkpoint]
    sweep(directory)
    assert all(name.startswith("step-00000001/") for name in open_storage(directory).sizes(""))
    remove(checkpoint)
    assert open_storage(directory).sizes("") == {} and list_checkpoints(directory) == []


def test_the_manifest_is_plain_json_with_a_format(place: Place) -> None:
    checkpoint = save(place(), 1200)
    storage = open_storage(checkpoint)
    assert storage.url.partition("?")[0].endswith("/step-00001200")
    manifest = json.loads(storage.read("manifest.json") or b"")
    assert (manifest["format"], manifest["step"], manifest["layout"]) == (1, 1200, "pp2·dp2·tp2")
    assert manifest["meta"] == {"cursor": [0, 1200], "tokens": 1200}
    storage.write("manifest.json", text := json.dumps({**manifest, "format": 9}).encode())
    storage.write("COMMITTED", durable._mark(text))
    with pytest.raises(ValueError, match="format 9 is not known; this version reads 1"):
        durable.checkpoint_holdings(checkpoint)
