"""Jobs that lose more than memory can give back, or at the worst moment: they go on from disk, or say what was lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.config import JobConfig
from orchestrator.local_cluster import LocalCluster
from orchestrator.survivable import InMemory, in_memory
from pipelines.batches import BatchBuilder, Cursor
from pipelines.corpus import Corpus
from pipelines.tokenizer import train_or_load
from tests.orchestrator.jobs import (
    Drive,
    Line,
    assert_every_step_once,
    assert_same_course,
    job,
    kill,
    phases,
    write_text,
)

ONE_PER_NODE = "standbys_per_node: 0, resources_per_worker: {CPU: 2}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("losses")
    write_text(folder)
    return folder


def test_a_keeper_then_two_losses_at_once_then_an_owner_with_its_copy(
    folder: Path, cluster: LocalCluster, reference: list[Line]
) -> None:
    """One worker per node, so that each loss costs a node's state; a checkpoint every four steps."""
    config = job(
        folder,
        "storm",
        f"scaling={{num_workers: [1, 4], {ONE_PER_NODE}}}",
        "layout=[dp4, dp3, dp2, '1']",
        "run.checkpoint_config.every_steps=4",
        "training.max_steps=100000",
    )
    drive = Drive(config, cluster)
    blows = iter(["keeper", "while recovering", "owner and copy", "none"])
    blow, since = next(blows), 0

    def on_step(line: Line) -> None:
        nonlocal blow, since
        since += 1
        if since < 6:
            return
        if blow == "none":
            drive.folder.request_stop()
            return
        if blow == "keeper":
            kill(drive.node_processes(drive.members[1]["node"])[:1])
        elif blow == "while recovering":
            second.append(drive.pids()[0])
            drive.signal_worker(1)
        elif not drive.checkpoints or line["world_size"] < 3:
            return  # until the workers that died have been replaced
        else:
            owner = drive.members[0]
            kill(drive.node_processes(owner["node"]) + drive.node_processes(owner["buddies"][0]))
        blow, since = next(blows, "none"), 0

    second: list[int] = []

    def recovering(events: list[Line]) -> bool:
        states = [event["state"] for event in events if event["kind"] == "state"]
        return bool(second) and states[-1:] == ["resharding"]

    with drive.when(recovering, lambda: kill([psutil.Process(second[0])])):
        end = drive.run(on_step)
    print(*(phases(incident) for incident in drive.incidents), sep="\n")
    assert end.error is None and blow == "none"
    assert_every_step_once(drive.metrics, drive.metrics[-1]["step"])
    assert_same_course(drive.metrics, reference)

    keeper, first, second_loss, fallen_back = [i for i in drive.incidents if i["kind"] == "failure"]
    assert keeper["source_tier"] == "memory" and len(keeper["nodes"]) == 1 and keeper["steps_run_again"] <= 1
    assert first["outcome"] == "superseded"
    assert second_loss["source_tier"] == "memory" and first["steps_run_again"] + second_loss["steps_run_again"] <= 1
    assert fallen_back["source_tier"] == "disk" and len(fallen_back["nodes"]) == 2
    (fallback,) = drive.events("fallback")
    assert fallback["step"] % 4 == 0 and "is lost: nobody holds" in fallback["cause"]
    again = [line for line in drive.all_metrics() if line["step"] == fallback["step"] + 1]
    assert len(again) == 2 and again[0]["batch_digest"] == again[1]["batch_digest"]


def test_two_nodes_at_once_are_decoded_from_parity(folder: Path, cluster: LocalCluster, reference: list[Line]) -> None:
    """RS 2+2 over four nodes, and no checkpoint; the run's folder tells beforehand what comes of it."""
    config = job(
        folder,
        "parity",
        f"scaling={{num_workers: [2, 4], {ONE_PER_NODE}}}",
        "layout=[dp4, dp2]",
        "protection={survive: 2, scheme: parity}",
        "training.max_steps=100000",
    )
    drive = Drive(config, cluster)
    lost: list[str] = []
    said: list[InMemory] = []

    def on_step(line: Line) -> None:
        if line["step"] == 6 and not lost:
            lost.extend(drive.mortal[:2])
            said.extend(in_memory(drive.folder, tuple(nodes)) for nodes in (lost, drive.mortal[:3]))
            kill([process for node in lost for process in drive.node_processes(node)])
        if line["world_size"] == 2 and line["step"] >= 10:
            drive.folder.request_stop()

    end = drive.run(on_step)
    assert end.error is None
    assert_every_step_once(drive.metrics, drive.metrics[-1]["step"])
    assert_same_course(drive.metrics, reference)
    incident = next(incident for incident in drive.incidents if incident["kind"] == "failure")
    assert sorted(incident["nodes"]) == sorted(lost)
    assert incident["source_tier"] == "memory" and incident["steps_run_again"] <= 1

    plans = drive.events("plan")
    assert [(plan["scheme"], plan["survives"], plan["asked"]) for plan in plans[:2]] == [
        ("parity", 2, 2),
        ("replica", 1, 2),
    ]
    assert [event["survives"] for event in drive.events("protected")[:2]] == [2, 1]
    assert drive.events("exposed")[0]["survives"] == 0
    two, three = said
    assert two.sources == ("primary", "parity") and two.step == 5
    assert not three.survives and set(three.lost_on) >= set(lost)


def test_what_is_lost_for_good_is_said(folder: Path, cluster: LocalCluster) -> None:
    """Owner and copy at once, and no checkpoint."""
    config = job(folder, "for-good", f"scaling={{num_workers: 3, {ONE_PER_NODE}}}", "layout=dp3")
    drive = Drive(config, cluster)

    def on_step(line: Line) -> None:
        if line["step"] == 5:  # and never again: there is nothing left to go on from
            owner = drive.members[0]
            kill(drive.node_processes(owner["node"]) + drive.node_processes(owner["buddies"][0]))

    end = drive.run(on_step)
    assert "the state of step" in str(end.error) and "is lost: nobody holds embedding.weight" in str(end.error)
    assert "there is no durable checkpoint to fall back to (run.checkpoint_config.every_steps is 0)" in str(end.error)
    assert [event["status"] for event in drive.events("ended")] == ["failed"]


def test_a_node_lost_before_the_first_step(folder: Path, cluster: LocalCluster, reference: list[Line]) -> None:
    config = job(folder, "early", f"scaling={{num_workers: [2, 4], {ONE_PER_NODE}}}", "layout=[dp4, dp3, dp2]")
    drive = Drive(config, cluster)

    def kill_one() -> None:
        cluster.kill_node(cluster.nodes[-1])

    with drive.when(lambda events: sum(event["kind"] == "node_admitted" for event in events) == 4, kill_one):
        end = drive.run()
    assert end.error is None
    assert_every_step_once(drive.metrics, 25)
    assert_same_course(drive.metrics, reference)
    assert len(drive.members) == 3 and drive.incidents == []


def test_an_error_that_comes_back_every_time_ends_the_job_with_its_cause(folder: Path, cluster: LocalCluster) -> None:
    """A model of the user's own that cannot take one row of step 4. What was made before it is saved."""
    config = job(folder, "poisoned", "scaling={num_workers: 2, standbys_per_node: 0}", "layout=dp2")
    poison = row_of_step(config, step=4, row=7)

    def build(vocab_size: int, seq_len: int) -> Any:
        from torch import nn

        class Poisoned(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding, self.output = nn.Embedding(vocab_size, 16), nn.Linear(16, vocab_size)

            def forward(self, tokens: Any) -> Any:
                import time

                if poison in tokens.tolist():
                    raise ArithmeticError(f"this row cannot be computed at {time.monotonic_ns()}")
                return self.output(self.embedding(tokens))

        return Poisoned()

    drive = Drive(config, cluster, model=build)
    end = drive.run()
    again = "the same failure came 3 times in a row without a step forward"
    assert str(end.error).startswith(f"{again}: ArithmeticError: this row cannot be computed at ")
    assert [Path(checkpoint).name for checkpoint in drive.checkpoints] == ["step-00000003"]
    assert_every_step_once(drive.metrics, 3)
    assert [incident["outcome"] for incident in drive.incidents][-1] == "ended" and len(drive.incidents) == 3


def row_of_step(config: JobConfig, step: int, row: int) -> list[int]:
    """The tokens of one row, from the global order alone."""
    corpus = Corpus.open(config.data.text)
    tokenizer = train_or_load(corpus, config.data.vocab_size)
    training = config.training
    builder = BatchBuilder(corpus, tokenizer, config.data, training.global_batch_rows, training.seed)
    cursor = Cursor(0, 0, 0)
    for _ in range(step):
        batch = builder.batch(cursor)
        cursor = batch.next
    return batch.rows.tokens[row].tolist()
