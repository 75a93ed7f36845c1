"""A whole run on a real S3 server: driven, resumed from its checkpoint under another layout, and read by commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpointing.publish import step_of
from orchestrator.cli import main
from orchestrator.local_cluster import LocalCluster
from orchestrator.summary import summarise
from tests.object_server import ObjectServer
from tests.orchestrator.jobs import Drive, assert_every_step_once, job, write_text


def test_a_run_on_s3_goes_on_from_there(
    tmp_path: Path,
    ray_cluster: LocalCluster,
    object_server: ObjectServer,
    capsys: pytest.CaptureFixture[str],
    prove: bool,
) -> None:
    write_text(tmp_path)
    shape = "scaling={num_workers: 2, standbys_per_node: 0}"
    path = object_server.url("runs")
    saving = ("run.checkpoint_config={every_steps: 2, num_to_keep: 1, keep: [{every_steps: 4}]}",)
    there = f"run.storage_path='{path}'"
    first = Drive(job(tmp_path, "far", shape, "layout=dp2", "training.max_steps=20", there, *saving), ray_cluster)
    end = first.run()
    assert (end.error, end.status) == (None, "finished")
    assert step_of(first.checkpoints[-1]) == 20 and len(first.events("checkpoint")) > 1
    second = Drive(job(tmp_path, "far", shape, "layout=tp2", "training.max_steps=30", there, *saving), ray_cluster)
    assert second.run(resume=True).error is None
    assert [event["step"] for event in second.events("resumed")] == [20]
    assert not second.events("checkpoint_failed") and not second.events("checkpoint_damaged")
    assert_every_step_once(second.metrics, 30)
    summary = summarise(second.folder)
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)

    run = second.folder.url
    assert main(["status", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"
    assert main(["checkpoint", "verify", run, "--json"]) == 0
    verified = json.loads(capsys.readouterr().out)
    assert max(map(step_of, verified)) == 30 and not any(verified.values())
    assert main(["checkpoint", "gc", run, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"dry_run": True, "removed": []}
    assert main(["checkpoint", "export", run, str(tmp_path / "exported")]) == 0
    keys = list(object_server.objects("runs/far/"))
    assert {"metrics", "events", "lease", "checkpoints"} <= {key.split("/")[2] for key in keys}
    assert object_server.unfinished_uploads() == [] and not [key for key in keys if "unfinished" in key]
    if prove:
        _assert_import_goes_on(tmp_path, there, ray_cluster, first.metrics[0]["loss"])


def _assert_import_goes_on(folder: Path, there: str, cluster: LocalCluster, first_loss: float) -> None:
    """What was exported begins another run, which goes on with what the model knew."""
    config = job(folder, "new", "training.max_steps=1", there)
    (folder / "new.yaml").write_text(config.to_yaml())
    assert main(["checkpoint", "import", str(folder / "exported"), str(folder / "new.yaml")]) == 0
    new = Drive(config, cluster)
    assert new.run().error is None
    assert new.events("resumed")[0]["step"] == 0
    assert new.metrics[0]["loss"] < first_loss - 0.1
