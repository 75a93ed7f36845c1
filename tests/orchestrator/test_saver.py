"""A checkpoint that cannot be written costs no training and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import exceptions

from checkpointing.arena import ArenaAddress
from checkpointing.config import CheckpointConfig
from checkpointing.cover import StateLost
from checkpointing.holding import Holding
from checkpointing.schema import Piece, Schema, TensorSpec
from checkpointing.snapshot import Record, Snapshot
from orchestrator import saver as saver_module
from orchestrator.ledger import Ledger
from orchestrator.runfolder import RunFolder
from orchestrator.saver import Saver


def test_half_a_checkpoint_is_removed_once_nobody_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[Path] = []
    waited: list[int] = []

    def write_durable(step: int, generation: int, attempt: str, share: Any, max_bytes_per_s: int | None) -> str:
        attempts.append(Path(attempt))
        (Path(attempt) / "data" / "half.safetensors").write_bytes(b"half")
        return attempt

    def get(refs: list[str]) -> None:
        raise exceptions.RayError("No space left on device")

    def wait(refs: list[str], num_returns: int) -> None:
        assert all(attempt.exists() for attempt in attempts)
        waited.append(num_returns)

    fake_ray = SimpleNamespace(get=get, wait=wait, exceptions=exceptions)
    monkeypatch.setattr(saver_module, "ray", fake_ray)
    monkeypatch.setattr(saver_module, "plan_shares", lambda schema, state: {"node-1": (), "node-2": ()})
    folder = RunFolder(str(tmp_path), "run")
    keeper = SimpleNamespace(write_durable=SimpleNamespace(remote=write_durable))
    saver = Saver(folder, CheckpointConfig(), Ledger(folder))

    assert saver._try(Schema((), 1), {"node-1": keeper, "node-2": keeper}, [], 1, 5, pinned=False) is None
    assert waited == [2] and attempts and not Path(saver.directory).exists()
    (event,) = folder.read_events()
    assert (event["kind"], event["step"], event["cause"]) == ("checkpoint_failed", 5, "No space left on device")


def test_an_interrupt_does_not_wait_for_the_keepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(refs: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(saver_module, "ray", SimpleNamespace(get=get, exceptions=exceptions))  # without a wait
    monkeypatch.setattr(saver_module, "plan_shares", lambda schema, state: {})
    folder = RunFolder(str(tmp_path), "run")
    with pytest.raises(KeyboardInterrupt):
        Saver(folder, CheckpointConfig(), Ledger(folder))._try(Schema((), 1), {}, [], 1, 5, pinned=False)
    assert folder.read_events() == []


def test_a_checkpoint_whose_pins_made_way_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_shares(schema: Any, state: Any) -> Any:
        raise StateLost("nobody holds it")

    monkeypatch.setattr(saver_module, "plan_shares", plan_shares)
    folder = RunFolder(str(tmp_path), "run")
    saver = Saver(folder, CheckpointConfig(), Ledger(folder))
    for pinned in (True, False):
        assert saver._try(Schema((), 1), {}, [], 1, 5, pinned) is None
    assert [event["kind"] for event in folder.read_events()] == ["checkpoint_skipped", "checkpoint_failed"]


def test_replicas_that_differ_are_named_and_the_checkpoint_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "plan_shares", lambda schema, state: {})
    monkeypatch.setattr(saver_module, "commit", lambda *_: "step-5")
    monkeypatch.setattr(saver_module, "ray", SimpleNamespace(get=list, exceptions=exceptions))
    schema = Schema((TensorSpec("w", (4,), "float32", None, "first"),), 1)
    piece = Piece("w", (0,), (4,))
    replicas = [
        Holding(
            Snapshot(1, 5, rank, "r2", (Record(piece, "float32", 0, 16, digest),), {}),
            1,
            f"node-{rank}",
            "primary",
            "memory",
            ArenaAddress(0, (), 0, ""),
        )
        for rank, digest in enumerate(("good", "bad"))
    ]
    folder = RunFolder(str(tmp_path), "run")
    saver = Saver(folder, CheckpointConfig(), Ledger(folder))
    assert saver._try(schema, {}, replicas, 1, 5, pinned=False) == "step-5"
    event, written = folder.read_events()
    assert (event["kind"], written["kind"]) == ("state_inconsistent", "checkpoint")
    assert event["cause"] == (
        "w[0:4] differs among its holders: primary of rank 0 on node node-0 against primary of rank 1 on node node-1"
    )
