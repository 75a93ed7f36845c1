"""``planaria checkpoint diff`` and ``reshard``, which work on checkpoints of any layouts, and ``survive``."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict

import click

from orchestrator.cli_parts import as_json, fail, newest_checkpoint, open_run, print_json, reach


def add_tools(group: click.Group) -> None:
    """Put the commands into the group ``checkpoint``."""
    group.add_command(diff)
    group.add_command(reshard)
    group.add_command(survive)


@click.command(epilog="Example: planaria checkpoint diff runs/before@1200 runs/after@1200 --allclose 1e-5")
@click.argument("a")
@click.argument("b")
@click.option(
    "--allclose",
    "rtol",
    type=click.FloatRange(0),
    callback=lambda _context, _option, value: _finite(value),
    metavar="RTOL",
    help="Equal is |a-b| <= RTOL*|b|, not bits.",
)
@as_json
def diff(a: str, b: str, rtol: float | None, as_json: bool) -> int:
    """Compare the tensors of two checkpoints. Their layouts may differ; exit code 1 when tensors do.

    A and B are each a checkpoint's folder, RUN for its newest checkpoint, or RUN@STEP.
    """
    from checkpointing.difference import differences
    from checkpointing.durable import read_manifest
    from checkpointing.holding import HoldingUnusable
    from checkpointing.retention import reading

    places = find_checkpoint(a), find_checkpoint(b)
    try:
        with ExitStack() as kept:
            for place in places:
                kept.enter_context(reading(place))
            num_tensors = len(read_manifest(places[0])["tensors"])
            found = list(differences(*places, rtol))
    except HoldingUnusable as damage:
        return fail(str(damage), code=2)
    if as_json:
        differing = [asdict(difference) for difference in found]
        print_json({"a": places[0], "b": places[1], "num_tensors": num_tensors, "differing": differing})
    else:
        how = "bit by bit" if rtol is None else f"within {rtol:g}"
        end = f"{len(found)} tensors differ" if found else f"{num_tensors} tensors are equal {how}"
        click.echo("\n".join([*map(str, found), end]))
    return 1 if found else 0


@click.command(epilog="Example: planaria checkpoint reshard runs/my-run@1200 resharded --layout pp2.tp4")
@click.argument("src")
@click.argument("dst")
@click.option("--layout", "text", required=True, metavar="LAYOUT", help="As in a job: pp2.dp2.tp2")
@as_json
def reshard(src: str, dst: str, text: str, as_json: bool) -> int:
    """Write SRC into the folder DST, cut for a layout. It is cut as the workers of LAYOUT hold it, and verified.

    SRC is a checkpoint's folder, RUN for its newest checkpoint, or RUN@STEP. Training does not need this: a run goes on
    from a checkpoint of any layout.
    """
    from checkpointing.durable import verify
    from checkpointing.holding import HoldingUnusable
    from checkpointing.layout import Layout
    from checkpointing.retention import reading
    from checkpointing.rewrite import rewrite
    from checkpointing.storage import open_storage

    layout, directory = Layout.parse(text), open_storage(dst).url
    place = find_checkpoint(src)
    reach(directory)
    refuse_kept(directory)
    try:
        with reading(place):
            made = rewrite(place, directory, layout)
    except HoldingUnusable as damage:
        return fail(str(damage), code=2)
    problems = verify(made, deep=True)
    if problems:
        return fail("; ".join(problems))
    if as_json:
        print_json({"path": made, "layout": str(layout), "source": place})
    else:
        click.echo(f"{made}: written under layout {layout} and verified")
    return 0


@click.command(epilog="Example: planaria checkpoint survive runs/my-run --lose node-2,node-3")
@click.argument("run")
@click.option("--lose", required=True, metavar="NODES", help="Nodes as events.jsonl names them: node-2,node-3")
@as_json
def survive(run: str, lose: str, as_json: bool) -> int:
    """Say which steps would survive losing nodes. NODES go all at once; exit code 1 when no step would be left."""
    from checkpointing.publish import step_of
    from orchestrator.survivable import in_memory, on_storage

    folder = open_run(run)
    lost = tuple(name.strip() for name in lose.split(",") if name.strip())
    memory = in_memory(folder, lost)
    stored, damaged = on_storage(folder)
    steps = [step for step in (memory.step if memory.survives else None, *map(step_of, stored)) if step is not None]
    if as_json:
        places = [{"step": step_of(location), "path": location} for location in stored]
        print_json({"lost": lost, "memory": asdict(memory), "checkpoints": places, "damaged": damaged})
    else:
        lines = [str(memory), *damaged, *(f"step {step_of(place)} survives in {place}" for place in reversed(stored))]
        click.echo("\n".join(lines) + ("" if steps else "\nno step would survive"))
    return 0 if steps else 1


def _finite(rtol: float | None) -> float | None:
    if rtol is not None and not math.isfinite(rtol):
        raise click.BadParameter(f"{rtol} is not a finite number.")
    return rtol


def find_checkpoint(text: str) -> str:
    """Location of the checkpoint that ``text`` names. Raises ValueError or click.UsageError when there is none."""
    return newest_checkpoint(text)


def refuse_kept(location: str) -> None:
    """Raise click.UsageError when ``location``, to be written to, is in a run's folder or a checkpoint, by any path."""
    from checkpointing.publish import MARK
    from checkpointing.storage import LocalStorage, open_storage, split

    storage = open_storage(location)
    place = str(storage.folder.resolve()) if isinstance(storage, LocalStorage) else storage.url
    while True:
        storage = open_storage(place)
        if storage.read(MARK) is not None:
            raise click.UsageError(
                f"{location} is in the checkpoint {place}, which stays as it is; choose another folder"
            )
        if storage.read("job.yaml") is not None and storage.names("lease"):  # a job's file alone makes no run
            raise click.UsageError(
                f"{location} is in the run's folder {place}, where only its driver writes; choose another one"
            )
        above, name = split(place)
        if not name or above.partition("?")[0].endswith((":/", ":")):
            return
        place = above
