"""Checkpoint folders: any layout reads them back, every damaged byte is named, and no crash tears one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from checkpointing import durable
from checkpointing.arena import Arena
from checkpointing.cover import StateLost, newest_complete
from checkpointing.holding import DigestMismatch, HoldingGone
from checkpointing.layout import Layout
from checkpointing.schema import pieces
from checkpointing.transfer import Destination, plan_transfer
from tests.checkpointing.node_keepers import TINY, Nodes, cut, random_reference, save_checkpoint

SAVED_UNDER = Layout.parse("dp2·tp2·pp2")


def save(directory: Path, step: int, layout: Layout = SAVED_UNDER) -> Path:
    return save_checkpoint(directory, step, layout)


def load(checkpoint: Path, layout: Layout, step: int) -> None:
    holdings = durable.checkpoint_holdings(checkpoint)
    assert newest_complete(TINY, holdings) == (1, step)
    destinations = {rank: Destination(f"n{rank}", pieces(TINY, layout, rank)) for rank in range(layout.size)}
    plan = plan_transfer(TINY, holdings, destinations)
    reference = random_reference(TINY, step)
    assert plan.tier == "disk"
    assert plan.bytes_moved == sum(cut(reference, p).nbytes for d in destinations.values() for p in d.pieces)
    for rank, destination in destinations.items():
        Nodes("a").load(plan, rank, destination, reference)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(before=st.builds(Layout, *[st.integers(1, 3)] * 4), after=st.builds(Layout, *[st.integers(1, 3)] * 4))
def test_any_layout_reads_what_any_layout_wrote(tmp_path_factory, before: Layout, after: Layout) -> None:
    directory = tmp_path_factory.mktemp("run")
    checkpoint = save(directory, 7, before)
    assert durable.verify(checkpoint, deep=True) == ()
    load(checkpoint, after, 7)


def test_every_box_is_written_once_and_the_nodes_share_the_work(tmp_path: Path) -> None:
    nodes = Nodes("abcd")
    nodes.protect(TINY, random_reference(TINY, 1), Layout.parse("r4"), "abcd")
    shares = durable.plan_shares(TINY, nodes.inventory("abcd"))
    assert list(shares) == list("abcd")
    written = [share.record.piece for node in shares for share in shares[node]]
    assert sorted(written) == sorted(pieces(TINY, Layout(), 0))
    nbytes = [sum(share.record.nbytes for share in shares[node]) for node in shares]
    assert max(nbytes) - min(nbytes) <= max(share.record.nbytes for node in shares for share in shares[node])
    with pytest.raises(StateLost, match=r"the state is lost: nobody holds embed\.weight"):
        durable.plan_shares(TINY, [])
    nodes.close()


def test_stock_readers_read_the_files(tmp_path: Path) -> None:
    """safetensors itself finds each box under its tensor's name; torch's reader joins the boxes."""
    import torch
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as torch_load

    checkpoint, reference = save(tmp_path, 3), random_reference(TINY, 3)
    for entry in durable.read_manifest(checkpoint)["files"]:
        if "optimizer" not in entry["file"]:
            tensors = load_file(checkpoint / entry["file"])
            for piece in entry["pieces"]:
                where = tuple(slice(o, o + n) for o, n in zip(piece["offset"], piece["size"], strict=True))
                assert tensors[piece["name"]].tobytes() == reference[piece["name"]][where].tobytes()
    parameters = {n: a for n, a in reference.items() if "/" not in n}
    state = {
        name: torch.zeros(array.shape, dtype=getattr(torch, array.dtype.name)) for name, array in parameters.items()
    }
    torch_load(state, storage_reader=HuggingFaceStorageReader(str(checkpoint / "data")), no_dist=True)
    for name, array in parameters.items():
        assert state[name].numpy().tobytes() == array.tobytes()


def test_a_flipped_bit_anywhere_is_found_and_named(tmp_path: Path) -> None:
    """Every file, first, middle and last byte; and every piece, whose loading is refused too."""
    checkpoint = save(tmp_path, 3)
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    for path in paths:
        whole = path.read_bytes()
        for index in {0, 11, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
            torn = bytearray(whole)
            torn[index] ^= 4
            path.write_bytes(torn)
            problems = durable.verify(checkpoint, deep=True)
            assert problems and str(checkpoint) in problems[0]
            assert path.name in problems[0] or path.name in ("COMMITTED", "manifest.json")
        path.write_bytes(whole)
    for holding in durable.checkpoint_holdings(checkpoint):
        for record in holding.snapshot.records:
            path = Path(holding.locator)
            whole = path.read_bytes()
            torn = bytearray(whole)
            torn[record.start + record.nbytes - 1] ^= 1
            path.write_bytes(torn)
            assert any(f"{record.piece.name}[" in problem for problem in durable.verify(checkpoint, deep=True))
            with pytest.raises(DigestMismatch, match=record.piece.name.replace(".", r"\.")) as error:
                load(checkpoint, Layout(), 3)
            assert error.value.key == holding.key
            path.write_bytes(whole)
    load(checkpoint, Layout(), 3)


def test_missing_and_cut_files_are_named_and_the_next_older_checkpoint_is_taken(tmp_path: Path) -> None:
    old, middle, new = save(tmp_path, 1), save(tmp_path, 2), save(tmp_path, 3)
    (tmp_path / "step-00000004").touch()  # a file is no checkpoint
    assert durable.list_checkpoints(tmp_path) == [old, middle, new]
    assert durable.newest_verified(tmp_path) == (new, ())
    gone = sorted((new / "data").glob("*.safetensors"))[0]
    gone.unlink()
    with pytest.raises(HoldingGone, match=gone.name):
        load(new, Layout(), 3)
    os.truncate(cut_off := sorted((middle / "data" / "optimizer").iterdir())[-1], 100)
    found, problems = durable.newest_verified(tmp_path, deep=False)
    assert found == old and len(problems) == 2
    assert f"{gone.name} is missing" in problems[0]
    assert f"{cut_off.name} has 100 bytes instead of" in problems[1]
    (old / "COMMITTED").unlink()
    found, problems = durable.newest_verified(tmp_path)
    assert found is None and "COMMITTED is missing" in problems[-1]


def test_a_committed_step_is_never_written_into(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 5)
    before = {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")}
    assert save(tmp_path, 5, Layout.parse("dp3")) == checkpoint
    assert {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")} == before
    torn = next((checkpoint / "data").glob("*.safetensors"))
    torn.write_bytes(torn.read_bytes()[:-1])
    save(tmp_path, 5, Layout.parse("dp3"))
    load(checkpoint, SAVED_UNDER, 5)
    aside = [path.name for path in tmp_path.iterdir() if path != checkpoint]
    assert len(aside) == 1 and aside[0].startswith("step-00000005.damaged-")


def test_an_incomplete_attempt_is_not_committed_and_cleaned_away(tmp_path: Path) -> None:
    nodes = Nodes("ab")
    nodes.protect(TINY, random_reference(TINY, 1), Layout.parse("dp2"), "ab")
    holdings = nodes.inventory("ab")
    attempt = durable.begin(tmp_path, 1)
    shares = durable.plan_shares(TINY, holdings)
    files = nodes.keepers["a"].write_durable(1, 1, str(attempt), shares["a"])
    with pytest.raises(StateLost, match="nobody holds"):
        durable.commit(attempt, TINY, holdings[0].snapshot, files)
    record = shares["b"][0].record
    record.data(Arena.attach(shares["b"][0].holding.locator).slot(1))[0] ^= 1
    with pytest.raises(DigestMismatch, match="primary of rank 1 on node b"):
        nodes.keepers["b"].write_durable(1, 1, str(attempt), shares["b"])
    assert durable.list_checkpoints(tmp_path) == []
    other = durable.begin(tmp_path, 2)
    assert [path for path in tmp_path.iterdir()] == [other]
    nodes.close()


def test_retention_keeps_the_newest_the_damaged_and_always_a_verified_one(tmp_path: Path) -> None:
    made = [save(tmp_path, step) for step in range(1, 6)]
    assert durable.retain(tmp_path, None) == []
    (made[3] / "manifest.json").unlink()
    assert durable.retain(tmp_path, 2) == made[:2]
    assert durable.list_checkpoints(tmp_path) == made[2:]
    file = next((made[4] / "data").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\0\xff"[file.read_bytes()[-1] == 0 :][:1])
    assert durable.retain(tmp_path, 1) == [], "the newest is damaged, so the one before must stay"
    assert durable.newest_verified(tmp_path)[0] == made[2]
    assert sorted(tmp_path.iterdir()) == made[2:]


CRASHING = """
import os, signal, sys
from pathlib import Path
from checkpointing import checkpoint_file, durable
from checkpointing.layout import Layout
from tests.checkpointing.node_keepers import save_checkpoint

left = int(sys.argv[2])
def dies(call):
    def wrapped(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return wrapped
for name in ("fsync", "rename", "mkdir", "open"):
    setattr(os, name, dies(getattr(os, name)))
checkpoint_file.safetensors.serialize_file = dies(checkpoint_file.safetensors.serialize_file)
directory = Path(sys.argv[1])
save_checkpoint(directory, 2, Layout.parse("dp2"), names="ab")
durable.retain(directory, 1)
"""


def test_kill_9_at_any_point_leaves_the_newest_committed_checkpoint_loadable(tmp_path: Path) -> None:
    """The process that writes step 2 and then removes step 1 is killed before its n-th call that touches the disk."""
    rng, seen, point = np.random.default_rng(0), set(), 0
    while True:
        point += 1 + int(rng.integers(0, 6))
        directory = tmp_path / str(point)
        save(directory, 1)
        killed = subprocess.run([sys.executable, "-c", CRASHING, str(directory), str(point)], cwd=Path.cwd())
        found, problems = durable.newest_verified(directory)
        assert found is not None and problems == ()
        load(found, Layout.parse("dp3"), durable.step_of(found))
        seen.add(durable.step_of(found))
        save(directory, 3)
        assert not list(directory.glob(".*")), "the next attempt cleans up"
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL
    assert seen == {1, 2} and point > 10


def test_the_manifest_is_plain_json_with_a_format(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1200)
    assert checkpoint.name == "step-00001200"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["layout"]) == (1, 1200, "pp2·dp2·tp2")
    assert manifest["meta"] == {"cursor": [0, 1200]}
    (checkpoint / "manifest.json").write_text(text := json.dumps({**manifest, "format": 9}))
    (checkpoint / "COMMITTED").write_bytes(durable._mark(text.encode()))
    with pytest.raises(ValueError, match="format 9 is not known; this version reads 1"):
        durable.checkpoint_holdings(checkpoint)
