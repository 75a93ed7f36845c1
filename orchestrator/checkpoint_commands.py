"""``planaria checkpoint …``: look at a run's durable checkpoints, check them, thin them out, exchange them."""

from __future__ import annotations

import click

from orchestrator.checkpoint_tools import add_tools
from orchestrator.cli_parts import (
    as_json,
    checkpoints_of,
    named_checkpoints,
    newest_checkpoint,
    open_run,
    print_json,
    step_option,
)
from orchestrator.interchange_commands import export_command, import_command


@click.group(epilog="Example: planaria checkpoint verify runs/my-run")
def checkpoint() -> None:
    """Look after checkpoints. List, show, verify, compare, re-shard, export, import and thin them out."""


add_tools(checkpoint)
checkpoint.add_command(export_command)
checkpoint.add_command(import_command)


@checkpoint.command("list", epilog="Example: planaria checkpoint list runs/my-run --json")
@click.argument("run")
@as_json
def list_command(run: str, as_json: bool) -> None:
    """List RUN's checkpoints, oldest first."""
    from checkpointing.publish import step_of

    found = [{"step": step_of(location), "path": location} for location in checkpoints_of(run)]
    if as_json:
        print_json(found)
    else:
        click.echo("\n".join(f"step {entry['step']}  {entry['path']}" for entry in found) or "no checkpoints")


@checkpoint.command(epilog="Example: planaria checkpoint show runs/my-run --step 1200")
@click.argument("run")
@step_option
@as_json
def show(run: str, step: int | None, as_json: bool) -> None:
    """Show what one checkpoint of RUN holds. RUN may also be RUN@STEP, or any checkpoint's folder."""
    from checkpointing.durable import read_manifest

    location = newest_checkpoint(run, step)
    manifest = read_manifest(location)
    if as_json:
        print_json(manifest)
        return
    files, tensors = manifest["files"], manifest["tensors"]
    click.echo(
        f"{location}: step {manifest['step']}, saved under layout {manifest['layout']}, "
        f"{sum('/' not in name for name in tensors)} parameters in {len(tensors)} tensors, {len(files)} files, "
        f"{sum(file['nbytes'] for file in files)} bytes"
    )


@checkpoint.command(epilog="Example: planaria checkpoint verify runs/my-run --deep")
@click.argument("run")
@click.option("--step", type=int, help="Step of the checkpoint; default all of them.")
@click.option("--deep/--shallow", default=True, help="Read every byte (the default), or look at names and sizes only.")
@as_json
def verify(run: str, step: int | None, deep: bool, as_json: bool) -> int:
    """Compare checkpoints with their digests. Exit code 1 when one is damaged.

    RUN may also be RUN@STEP, or any checkpoint's folder.
    """
    from checkpointing.durable import verify
    from checkpointing.retention import reading

    problems = {}
    for location in named_checkpoints(run, step):
        with reading(location):
            problems[location] = list(verify(location, deep))
    if as_json:
        print_json(problems)
    else:
        for location, sentences in problems.items():
            click.echo("\n".join(sentences) or f"{location}: whole")
    return 1 if any(problems.values()) else 0


@checkpoint.command(epilog="Example: planaria checkpoint gc runs/my-run --dry-run")
@click.argument("run")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@as_json
def gc(run: str, dry_run: bool, as_json: bool) -> int:
    """Remove checkpoints that the job's rules drop. A driver at work does so by itself."""
    from checkpointing.retention import retain, superfluous

    folder = open_run(run)
    if not dry_run and folder.lease is not None and folder.lease.live:
        raise click.UsageError(f"a driver is at work on run {folder.name!r} and removes what is not kept by itself")
    arguments = (
        folder.location("checkpoints"),
        folder.read_job().run.checkpoint_config,
        lambda: {line["step"]: line for line in folder.read_metrics()},
    )
    gone = superfluous(*arguments) if dry_run else retain(*arguments)
    if as_json:
        print_json({"dry_run": dry_run, "removed": gone})
    else:
        click.echo(
            "\n".join(f"{'would remove' if dry_run else 'removed'} {location}" for location in gone) or "nothing"
        )
    return 0
