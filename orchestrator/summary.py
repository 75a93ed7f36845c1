"""What a run did, read from its files alone: steps, incidents, seconds by phase, and whether order was kept."""

from __future__ import annotations

from typing import Any

from orchestrator.ledger import PHASES
from orchestrator.runfolder import RunFolder
from pipelines.batches import BatchBuilder, Cursor
from pipelines.corpus import Corpus
from pipelines.tokenizer import train_or_load


def summarise(folder: RunFolder) -> dict[str, Any]:
    """Plain JSON. ``samples_lost`` and ``samples_repeated`` come from rebuilding the global order from the job alone,
    in this process, and holding its batch digests against those of metrics.jsonl.
    """
    metrics, events = folder.read_metrics(), folder.read_events()
    incidents = [event for event in events if "incident" in event]
    return {
        "path": folder.url,
        "steps": len(metrics),
        "final_loss": metrics[-1]["loss"],
        "incidents": [{key: incident[key] for key in _OF_AN_INCIDENT if key in incident} for incident in incidents],
        "phase_seconds": {
            phase: round(sum(incident["phases"][phase] for incident in incidents), 3) for phase in PHASES
        },
        "steps_run_again": sum(incident["steps_run_again"] for incident in incidents),
        **_samples(folder, metrics),
    }


_OF_AN_INCIDENT = (
    "kind",
    "nodes",
    "workers",
    "layout_before",
    "layout_after",
    "source_tier",
    "seconds",
    "steps_run_again",
    "bytes_moved",
    "bytes_lower_bound",
)


def _samples(folder: RunFolder, metrics: list[dict[str, Any]]) -> dict[str, int]:
    """Rows of steps that are missing or took another batch (lost), and rows of batches that came twice (repeated)."""
    job = folder.read_job()
    assert job is not None
    corpus = Corpus.open(job.data.text)
    rows = job.training.global_batch_rows
    tokenizer = folder.keep_text("tokenizer.json", lambda: train_or_load(corpus, job.data.vocab_size))
    builder = BatchBuilder(corpus, tokenizer, job.data, rows, job.training.seed)
    got = {line["step"]: line["batch_digest"] for line in metrics}
    cursor, lost = Cursor(0, 0, 0), 0
    for step in range(1, max(got) + 1):
        batch = builder.batch(cursor)
        lost += batch.digest != got.get(step)
        cursor = batch.next
    return {"samples_lost": lost * rows, "samples_repeated": (len(got) - len(set(got.values()))) * rows}
