"""``python -m benchmarks NAME [--quick] [--json]``; ``all`` runs every benchmark and writes benchmarks/RESULTS.md."""

from __future__ import annotations

import importlib
import json
import os
import platform
import secrets
import time
from pathlib import Path

import click

from benchmarks.rows import Row, table

NAMES = ("erasure", "recovery", "reshard", "restore", "save", "snapshot", "steady")
_RESULTS = Path(__file__).resolve().parent / "RESULTS.md"


@click.command(epilog="Example: python -m benchmarks recovery --quick")
@click.argument("name", type=click.Choice(("all", *NAMES)))
@click.option("--quick", is_flag=True, help="Few and short runs, some minutes: to see that it works, not to quote.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def main(name: str, quick: bool, as_json: bool) -> None:
    """Measure ours beside the alternatives; a ratio above 1 means that ours is better."""
    _isolate()
    rows: list[Row] = []
    sections = []
    for each in NAMES if name == "all" else (name,):
        module = importlib.import_module(f"benchmarks.{each}")
        load = os.getloadavg()[0]
        fresh: list[Row] = module.run(quick)
        rows += fresh
        sections.append(
            f"## {each}\n\n{module.__doc__}\nLoad of the machine at the start: {load:.1f}.\n\n{table(fresh)}\n"
        )
        if not as_json:
            click.echo(sections[-1])
    if as_json:
        click.echo(json.dumps(rows, indent=1, ensure_ascii=False))
    if name == "all" and not quick:
        _RESULTS.write_text("\n".join((_heading(), *sections)), encoding="utf-8")


def _isolate() -> None:
    """Before Ray is imported, and inherited by all that starts: its own clusters only, and our code on every node."""
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(
        PYTHONPATH=str(_RESULTS.parent.parent),
        OMP_NUM_THREADS="1",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(16),
    )


def _heading() -> str:
    from importlib.metadata import version

    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "ray"))
    return (
        "# Results\n\n"
        "Written by `make bench`. Medians with (min to max); a ratio above 1 means that ours is better.\n\n"
        f"- {time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {versions}\n"
        f"- {_machine()}\n"
    )


def _machine() -> str:
    """Kind of machine: processor, cores, memory."""
    import psutil

    processor = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = (line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line)
        processor = next(models, processor)
    memory = psutil.virtual_memory().total / 2**30
    return f"{platform.system()}, {processor}, {psutil.cpu_count()} cores, {memory:.0f} GiB of memory, no GPU used"


if __name__ == "__main__":
    main()
