"""``planaria checkpoint export`` and ``import``."""

from __future__ import annotations

import shlex

import click

from orchestrator.checkpoint_tools import find_checkpoint, refuse_kept
from orchestrator.cli_parts import as_json, fail, print_json, reach


@click.command("export", epilog="Example: planaria checkpoint export runs/my-run@1200 exported")
@click.argument("src")
@click.argument("dst")
@as_json
def export_command(src: str, dst: str, as_json: bool) -> int:
    """Write SRC's model for transformers. It goes into the new folder DST in Hugging Face's format (as a Llama).

    SRC is a checkpoint's folder, RUN for its newest checkpoint, or RUN@STEP; it must be in a run's folder, whose job
    says what the model is.
    """
    from checkpointing.holding import HoldingUnusable
    from checkpointing.retention import reading
    from checkpointing.storage import open_storage, split
    from orchestrator.interchange import export_hugging_face
    from orchestrator.runfolder import RunFolder

    target, place = open_storage(dst).url, find_checkpoint(src)
    reach(target)
    refuse_kept(target)
    folder = RunFolder.open(split(split(place)[0])[0])
    job, tokenizer = folder.read_job(), open_storage(folder.url).read("tokenizer.json")
    assert job is not None
    try:
        with reading(place):
            files = export_hugging_face(place, job, dst, {} if tokenizer is None else {"tokenizer.json": tokenizer})
    except HoldingUnusable as damage:
        return fail(str(damage))
    if as_json:
        print_json({"path": dst, "source": place, "files": files})
    else:
        click.echo(f"{dst}: {len(files)} safetensors files from {place}")
    return 0


@click.command("import", epilog="Example: planaria checkpoint import llama-folder job.yaml")
@click.argument("src")
@click.argument("job", metavar="JOB.yaml")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the job; the value is YAML.")
@as_json
def import_command(src: str, job: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Make SRC the first checkpoint of a new run. JOB.yaml names the run, and 'planaria train' then begins from it.

    SRC is a folder in Hugging Face's format (a Llama) or a checkpoint of torch.distributed.checkpoint, whose optimizer
    state is taken over where it has one.
    """
    from pathlib import Path

    from checkpointing.durable import verify
    from checkpointing.publish import list_checkpoints
    from orchestrator.config import JobConfig
    from orchestrator.interchange import check_source, import_tensors, open_source
    from orchestrator.own_model import find_build
    from orchestrator.runfolder import RunFolder
    from workers.models.spec import describe
    from workers.program import Program

    try:
        config = JobConfig.from_yaml(job, overrides)
    except OSError as error:
        raise click.UsageError(f"{job} cannot be read: {error.strerror}") from None
    if config.run.name is None:
        raise click.UsageError(f"{job} has no run.name, so 'planaria train' would not find what is imported")
    folder = RunFolder(config.run.storage_path, config.run.name)
    reach(folder.url)
    directory = folder.location("checkpoints")
    if folder.read_job() is not None or list_checkpoints(directory):
        raise click.UsageError(f"there is a run in {folder.url} already; choose a new run.name")
    reach(src)
    source = open_source(src)
    check_source(src, config)
    model = config.model
    if isinstance(model, str):
        model = find_build(model, [Path(job).absolute().parent, Path.cwd()])
    program = Program(model, config.optimizer, config.training, config.data.vocab_size, config.data.seq_len)
    made, num_states = import_tensors(source, describe(program), directory)
    problems = verify(made, deep=True)
    if problems:
        return fail("; ".join(problems))
    if as_json:
        print_json({"path": made, "source": src, "optimizer_tensors": num_states})
    else:
        state = f"{num_states} tensors of optimizer state" if num_states else "fresh optimizer state"
        again = shlex.join(["planaria", "train", job, *(part for text in overrides for part in ("--set", text))])
        click.echo(f"{made}: imported with {state}, and verified; go on with: {again}")
    return 0
