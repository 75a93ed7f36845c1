"""What all commands share: options, output, and how a run is named."""

from __future__ import annotations

import json
import os
from typing import Any

import click

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
step_option = click.option("--step", type=int, help="Step of the checkpoint; default the newest.")


def fail(sentence: str, code: int = 1) -> int:
    click.echo(f"planaria: {sentence}", err=True)
    return code


def print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=1, ensure_ascii=False))


def open_run(run: str) -> Any:
    """The run in the folder ``run`` (a path or s3://…), or the run of that name under ./runs."""
    from orchestrator.runfolder import RunFolder

    is_name = "/" not in run and not os.path.isdir(run)
    return RunFolder.open(os.path.join("runs", run) if is_name else run)


def checkpoints_of(run: str, step: int | None = None) -> list[str]:
    """Locations of RUN's checkpoints (of ``step``), oldest first. Raises click.UsageError when ``step`` has none."""
    from checkpointing.publish import list_checkpoints, step_of

    found = [c for c in list_checkpoints(open_run(run).location("checkpoints")) if step in (None, step_of(c))]
    if step is not None and not found:
        raise click.UsageError(f"run {run!r} has no checkpoint of step {step}")
    return found


def newest_checkpoint(run: str, step: int | None) -> str:
    """RUN's newest checkpoint (of ``step``). Raises click.UsageError when there is none."""
    found = checkpoints_of(run, step)
    if not found:
        raise click.UsageError(f"run {run!r} has no checkpoint")
    return found[-1]
