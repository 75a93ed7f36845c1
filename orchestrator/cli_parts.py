"""What all commands share: options, output, and how a run is named."""

from __future__ import annotations

import json
import os
import re
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

    location = _location(run)
    reach(location)
    return RunFolder.open(location)


def _location(run: str) -> str:
    """A folder here that only has the name of a run, and no job in it, is not meant."""
    name = run.removesuffix("/")
    is_name = "/" not in name and not os.path.exists(os.path.join(name, "job.yaml"))
    return os.path.join("runs", name) if is_name else run


def reach(location: str) -> None:
    """Before a command's first use of ``location``: OSError when nothing listens there, a line when it is silent."""
    from checkpointing.storage import check_reachable

    try:
        check_reachable(location)
    except TimeoutError as silence:
        click.echo(f"planaria: {silence}", err=True)


def checkpoints_of(run: str, step: int | None = None) -> list[str]:
    """Locations of RUN's checkpoints (of ``step``), oldest first. Raises click.UsageError when ``step`` has none."""
    from checkpointing.publish import list_checkpoints, step_of

    found = [c for c in list_checkpoints(open_run(run).location("checkpoints")) if step in (None, step_of(c))]
    if step is not None and not found:
        raise click.UsageError(f"run {run!r} has no checkpoint of step {step}")
    return found


def named_checkpoints(text: str, step: int | None) -> list[str]:
    """Locations of what ``text`` names, oldest first: a checkpoint's folder (also outside of runs), RUN@STEP, or all of
    RUN's (of ``step``). What exists under the whole text comes before RUN@STEP.

    Raises click.UsageError or ValueError when there is none.
    """
    from checkpointing.publish import MANIFEST, MARK
    from checkpointing.storage import open_storage

    reach(text)
    storage = open_storage(text)
    if storage.read(MANIFEST) is not None or storage.read(MARK) is not None:
        if step is not None:
            raise click.UsageError(f"{text} is one checkpoint; --step is for a run")
        return [storage.url]
    at_step = re.fullmatch(r"(.+)@([0-9]{1,18})", text)
    if at_step is not None and step is None and not _exists(_location(text)):
        return checkpoints_of(at_step[1], int(at_step[2]))
    found = checkpoints_of(text, step)
    if not found:
        raise click.UsageError(f"run {text!r} has no checkpoint")
    return found


def newest_checkpoint(text: str, step: int | None = None) -> str:
    """The newest of ``named_checkpoints``."""
    return named_checkpoints(text, step)[-1]


def _exists(location: str) -> bool:
    from checkpointing.storage import LocalStorage, open_storage

    storage = open_storage(location)
    return storage.folder.exists() if isinstance(storage, LocalStorage) else storage.read("job.yaml") is not None
