"""What a run begins with: nothing, or the newest whole checkpoint, and never silently nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpointing.cover import StateLost
from checkpointing.layout import Layout
from orchestrator.ledger import Ledger
from orchestrator.runfolder import RunFolder
from orchestrator.survival import Survival
from tests.checkpointing.node_keepers import TINY, save_checkpoint

NO_NODES: Any = None


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again_by_itself(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    directory = folder.location("checkpoints")
    survival = Survival(TINY, NO_NODES, directory, Ledger(folder))
    assert survival.first().step == 0

    for step in (1, 2):
        save_checkpoint(directory, step, Layout.parse("dp2"))
    assert survival.first().step == 2
    for step, left in ((2, 1), (1, None)):
        data = next(Path(directory).glob(f"step-*{step}/data/*.safetensors"))
        content = bytearray(data.read_bytes())
        content[-1] ^= 1
        data.write_bytes(content)
        if left:
            assert survival.first().step == left
    with pytest.raises(StateLost, match=f"no checkpoint in {directory} is whole, so the run cannot go on"):
        survival.first()
    damaged = [event["cause"] for event in folder.read_events() if event["kind"] == "checkpoint_damaged"]
    assert len(damaged) == 3 and "step-00000002" in damaged[0] and "step-00000001" in damaged[2]
