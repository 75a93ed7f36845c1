"""Jobs under observation: a driver in a process of its own, followed through the lines that it writes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.config import JobConfig

T = TypeVar("T")
Line = dict[str, Any]
HOME = Path(__file__).resolve().parent.parent
_POLL_S = 0.02


@dataclass
class Lines:
    """A file of JSON lines that somebody else appends to."""

    path: Path
    _offset: int = 0
    _seen: list[Line] = field(default_factory=list)

    def read(self) -> list[Line]:
        """All whole lines so far."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._offset)
                fresh = file.read()
            whole = fresh[: fresh.rfind(b"\n") + 1]
            self._offset += len(whole)
            self._seen += [json.loads(line) for line in whole.splitlines()]
        return self._seen


@dataclass(frozen=True)
class Job:
    """A running job. ``steps`` holds a line per step with at least time, step, generation and world_size."""

    process: subprocess.Popen[bytes]
    log: Path
    steps: Lines
    events: Lines

    def wait_for(self, look: Callable[[], T | None], what: str, timeout_s: float = 300.0) -> T:
        """What ``look`` gives as soon as it is not None. Raises RuntimeError when the job ends or takes too long."""
        deadline = time.monotonic() + timeout_s
        while (found := look()) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"waited in vain for {what}; {self._last_lines()}")
            time.sleep(_POLL_S)
        return found

    def next_steps(self, count: int) -> list[Line]:
        """The lines of the next ``count`` steps from now on."""
        before = len(self.steps.read())
        return self.wait_for(lambda: self.steps.read()[before:][:count] if self._has(before + count) else None, "steps")

    def _has(self, count: int) -> bool:
        return len(self.steps.read()) >= count

    def finish(self, timeout_s: float = 600.0) -> list[Line]:
        """Wait for the job to reach its end; all its steps."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            raise RuntimeError(f"the driver ended with {code}; {self._last_lines()}")
        return self.steps.read()

    def _last_lines(self) -> str:
        return "the driver's last lines:\n" + "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


@contextlib.contextmanager
def running(command: Sequence[str], folder: Path, env: dict[str, str], steps: str, events: str) -> Iterator[Job]:
    """Start ``command`` with its log in ``folder``, and end it with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "driver.log"
    env = {**os.environ, "PYTHONPATH": str(HOME), "OMP_NUM_THREADS": "1", **env}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=folder, start_new_session=True)
    try:
        yield Job(process, log, Lines(folder / steps), Lines(folder / events))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # helpers that a hard end has left behind
        process.wait()


@contextlib.contextmanager
def planaria(job: JobConfig, folder: Path, address: str) -> Iterator[Job]:
    """``planaria train`` of ``job``, whose run is called "run" and lies in ``folder``, on an existing cluster."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.yaml").write_text(job.to_yaml())
    command = [sys.executable, "-m", "orchestrator", "train", "job.yaml", "--address", address]
    with running(command, folder, {}, "run/metrics.jsonl", "run/events.jsonl") as started:
        yield started


def step_times(lines: Sequence[Line], skip: int) -> list[float]:
    """Seconds from the end of one step to the end of the next, but for the first ``skip`` steps."""
    times = [line["time"] for line in lines[skip:]]
    return [after - before for before, after in zip(times, times[1:], strict=False)]


def median_step(lines: Sequence[Line], skip: int) -> float:
    return statistics.median(step_times(lines, skip))
