"""The command line. Exit code 0: done; 1: it failed; 2: your input is wrong (one sentence on stderr).

What takes long to import is imported by the command that needs it.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import click

from orchestrator.checkpoint_commands import checkpoint
from orchestrator.cli_parts import as_json, fail, open_run, print_json, reach
from orchestrator.one_place import foreign_package

_RESERVED = {
    "plan": "Search for the best plan for a job on this cluster.",
    "simulate": "Run a job's plan over a failure trace.",
    "report": "Write a run's report.html.",
    "data": "Build, inspect and tune a job's input.",
}

text_option = click.option(
    "--text", "text", multiple=True, metavar="PATH", help="Train on this file or folder of text (may be repeated)."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``arguments`` default to the process's own."""
    problem = foreign_package()
    if problem is not None:
        return fail(problem, code=2)
    try:
        with _terminated_as_interrupted():
            return cli.main(args=None if arguments is None else list(arguments), standalone_mode=False) or 0
    except click.exceptions.Exit as request:
        return request.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.ClickException as error:
        return fail(error.format_message(), code=2)
    except click.Abort:
        return fail("interrupted")
    except ValueError as error:
        # Ray wraps what a remote method raised; the sentence for the user is inside.
        return fail(str(getattr(error, "cause", None) or error), code=2)
    except OSError as error:  # a full disk, a folder that went away: nothing that the input could have told
        return fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, so that it puts away what it has begun (only a main thread can)."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@click.group(
    "planaria",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: planaria train examples/hybrid.yaml --set training.max_steps=50",
)
@click.version_option(package_name="planaria")
def cli() -> None:
    """Elastic, hybrid-parallel PyTorch training on Ray that regrows from whatever survives."""


@cli.command(epilog="Example: planaria demo --text ~/books")
@text_option
@as_json
def demo(text: tuple[str, ...], as_json: bool) -> int:
    """Train on this machine, and kill a node. The cluster has four nodes of two workers."""
    from orchestrator.demo import run_demo

    return run_demo(text=text or None, as_json=as_json)


@cli.command(epilog="Example: planaria train job.yaml --set training.max_steps=50 --set 'layout=[dp2.tp2, dp2]'")
@click.argument("job", metavar="JOB.yaml")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the job; the value is YAML.")
@text_option
@click.option("--resume", is_flag=True, help="Go on with a finished run (to a later end).")
@click.option("--address", metavar="ADDRESS", help="Ray cluster to use; default $RAY_ADDRESS, else a local one.")
@as_json
def train(
    job: str, overrides: tuple[str, ...], text: tuple[str, ...], resume: bool, address: str | None, as_json: bool
) -> int:
    """Train the job in JOB.yaml. An unfinished run of the same name is taken up again."""
    from orchestrator.config import JobConfig

    if text:
        overrides += (f"data.text={json.dumps([str(Path(path).absolute()) for path in text])}",)
    try:
        config = JobConfig.from_yaml(job, overrides)
    except OSError as error:
        raise click.UsageError(f"{job} cannot be read: {error.strerror}") from None
    reach(config.run.storage_path)
    from orchestrator.progress import StepLines, end_line
    from orchestrator.trainer import ElasticTrainer

    lines = StepLines(lambda text: click.echo(text, err=as_json))  # with --json, stdout holds the result alone
    trainer = ElasticTrainer(config, folders=[Path(job).absolute().parent])
    end = trainer.run(resume=resume, address=address, on_step=lines)
    lines({"message": end_line(end.path, end.status, end.metrics, len(end.incidents))})
    if as_json:
        print_json(
            {"path": end.path, "status": end.status, "metrics": end.metrics, "error": end.error and str(end.error)}
        )
    return 0 if end.error is None else fail(str(end.error))


@cli.command(epilog="Example: planaria status runs/my-run --json")
@click.argument("run")
@as_json
def status(run: str, as_json: bool) -> None:
    """Show how far RUN has come. RUN is its folder, or its name under ./runs."""
    from orchestrator.status import describe_run, read_status

    found = read_status(open_run(run))
    if as_json:
        print_json(found)
    else:
        click.echo(describe_run(found))


@cli.command(epilog="Example: planaria stop runs/my-run")
@click.argument("run")
def stop(run: str) -> int:
    """Ask RUN's driver to stop. It writes a checkpoint and exits with code 0."""
    folder = open_run(run)
    if folder.lease is None or not folder.lease.live:
        return fail(f"no driver is at work on run {folder.name!r}; there is nothing to stop")
    folder.request_stop()
    click.echo(f"asked run {folder.name!r} to stop after a checkpoint")
    return 0


cli.add_command(checkpoint)


def _reserve(name: str, purpose: str) -> None:
    @cli.command(name, help=f"Not available yet. {purpose}", context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def reserved(arguments: tuple[str, ...]) -> int:
        return fail(f"'planaria {name}' is not available in this version", code=2)


for _name, _purpose in _RESERVED.items():
    _reserve(_name, _purpose)
