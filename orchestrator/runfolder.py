"""A run's folder ``<storage_path>/<name>/``: what was asked, what was decided, what happened, and who drives it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from checkpointing.storage import LocalStorage, join, open_storage, split
from orchestrator.config import JobConfig
from orchestrator.environment import code_digest, describe_environment
from orchestrator.lease import Lease, read_lease, renew_lease, take_lease
from orchestrator.lines import FORMAT, open_lines

Status = Literal["finished", "stopped", "failed"]
_LEASE_S = 10.0


class RunRefused(ValueError):
    """The run's name cannot be used in this way; one sentence says why and what to do."""


@dataclass(frozen=True)
class Acquired:
    """What a driver is to do after it has got the run.

    job        the job to run: as asked, with an open ``optimizer.decay_steps`` settled by the run's first driver
    resumed    False: a new run; True: there may be keepers, snapshots or checkpoints to go on from
    same_code  whether the driver before ran the code that runs now (keepers of other code must not be reused)
    epoch      the lease's epoch; an older driver is fenced
    message    one line for the user
    """

    job: JobConfig
    resumed: bool
    same_code: bool
    epoch: int
    message: str


class RunFolder:
    """One run on local disk, S3, or behind any pyarrow URI.

    Nothing is created before ``acquire``. A driver calls ``acquire``, then ``renew`` at least every ``lease.ttl_s / 3``
    seconds (calling it more often costs nothing), then ``finish``. Readers need none of these.
    """

    def __init__(self, storage_path: str, name: str) -> None:
        self.name = name
        open_storage(storage_path)  # says what is wrong with it, before the name is added
        self._storage = open_storage(join(storage_path, name))
        self.url = self._storage.url
        self._metrics = open_lines(self._storage, "metrics")
        self._events = open_lines(self._storage, "events")
        self._lease: Lease | None = None

    @classmethod
    def open(cls, location: str) -> RunFolder:
        """The run at ``location`` ("runs/my-run", "s3://bucket/my-run"). Raises RunRefused when there is none."""
        folder = cls(*split(location))
        if folder._storage.read("job.yaml") is None:
            raise RunRefused(f"there is no run in {folder.url} (it has no job.yaml)")
        return folder

    @property
    def is_local(self) -> bool:
        return isinstance(self._storage, LocalStorage)

    def location(self, *parts: str) -> str:
        """Absolute path or URI of something in the folder: ``location("checkpoints")``."""
        return join(self.url, *parts)

    def log_location(self, generation: int, node: str, rank: int) -> str:
        """Path of the file for what a rank prints. An object cannot be appended to: then it stays in Ray's own logs."""
        if not self.is_local:
            return "/dev/stdout"
        return self.location("logs", str(generation), f"{node}-{rank}.log")

    # Driving

    def acquire(self, job: JobConfig, *, resume: bool = False) -> Acquired:
        """Become the run's driver, or raise RunRefused with one sentence.

        A live driver, a finished run without ``resume`` and a later end, and another job's run are refused; an
        unfinished run of the same job is taken over.
        """
        before = self._read_lease()
        if before is not None and before.live:
            left = max(before.expires - time.time(), 0)
            raise RunRefused(
                f"run {self.name!r} is being driven from {before.host} (its lease ends in {left:.0f} s unless it is "
                "renewed); stop it with 'planaria stop', or choose another run.name"
            )
        stored = self.read_job()
        if stored is None and resume:
            raise RunRefused(f"there is no run to resume in {self.url}; leave --resume out to start one")
        settled = job.resolved(stored)
        if stored is not None:
            self._refuse_other_job(settled, stored)
        if before is not None and before.status == "finished":
            reached = (self.read_metrics() or [{"step": 0, "total_tokens": 0}])[-1]
            if not resume or settled.training.is_over(reached["step"], reached["total_tokens"]):
                raise RunRefused(
                    f"run {self.name!r} is finished, at step {reached['step']}; use --resume with a later end "
                    "(training.max_steps ...) for a longer run, or choose a new run.name"
                )
        lease = take_lease(self._storage, before, min(_LEASE_S, job.orphan_grace_s / 2))
        if lease is None:
            raise RunRefused(f"run {self.name!r} was taken by another driver just now")
        self._lease = lease
        if isinstance(self._storage, LocalStorage):
            self._storage.sweep()
        same_code = self.read_environment().get("code_digest") == code_digest()
        self._storage.remove("stop")
        self._storage.write("job.yaml", settled.to_yaml().encode())
        self.write_environment(describe_environment(job.training.seed))
        message = f"starting run {self.name!r} in {self.url}"
        if stored is not None:
            last = before.status if before is not None and before.status != "running" else "left by its driver"
            message = f"resuming run {self.name!r} in {self.url} ({last})"
        return Acquired(settled, stored is not None, same_code, lease.epoch, message)

    def _refuse_other_job(self, job: JobConfig, stored: JobConfig) -> None:
        differing = job.differences(stored)
        if differing:
            raise RunRefused(
                f"run {self.name!r} holds another job, which differs in {', '.join(differing)}; choose a new run.name, "
                "or put these back (docs/configuration.md marks the keys that may change with t)"
            )

    @property
    def lease(self) -> Lease | None:
        """This driver's lease, or the newest one when this is not the driver."""
        return self._lease or self._read_lease()

    def _read_lease(self) -> Lease | None:
        try:
            return read_lease(self._storage)
        except (ValueError, KeyError, TypeError) as error:
            raise RunRefused(
                f"the newest file in {self.location('lease')} is damaged ({_brief(error)}); "
                "remove it if no driver is at work"
            ) from None

    def renew(self) -> None:
        """Keep the lease, and write lines that have waited. Raises LeaseLost when another driver has taken over."""
        assert self._lease is not None, "renew before acquire"
        if self._lease.expires - time.time() < self._lease.ttl_s * 2 / 3:
            self._lease = renew_lease(self._storage, self._lease)
        self.flush()

    def finish(self, status: Status) -> None:
        """Write what waits and give the lease back. Raises LeaseLost when another driver has taken over."""
        assert self._lease is not None, "finish before acquire"
        self.flush(force=True)
        renew_lease(self._storage, self._lease, status)
        self._lease = None

    def discard(self) -> None:
        """Remove the folder of a run that did not begin."""
        self._storage.remove_folder("")

    # Asking a driver to stop

    def request_stop(self) -> None:
        self._storage.write("stop", b"")

    def stop_requested(self) -> bool:
        return self._storage.read("stop") is not None

    # Writing

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        self._metrics.append(line)

    def append_event(self, line: Mapping[str, Any]) -> None:
        self._events.append(line)

    def flush(self, *, force: bool = False) -> None:
        self._metrics.flush(force=force)
        self._events.flush(force=force)

    def write_plan(self, generation: int, plan: Mapping[str, Any]) -> None:
        """Add ``plan`` (plain JSON) to plan.json, which holds every plan of the run by generation."""
        plans = {**self.read_plans(), generation: plan}
        self._write_json("plan.json", {"plans": {str(key): value for key, value in sorted(plans.items())}})

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Replace environment.json. The controller adds ``hosts`` (kinds of host, no names) once it knows them."""
        self._write_json("environment.json", environment)

    def keep_text(self, name: str, make: Callable[[], str]) -> str:
        """The text kept in the folder as ``name``; made now if there is none. A resumed run finds the same."""
        data = self._storage.read(name)
        if data is None:
            data = make().encode()
            self._storage.write(name, data)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise RunRefused(f"{self.location(name)} is damaged: {_brief(error)}") from None

    @contextmanager
    def probe(self) -> Iterator[str]:
        """Path of a local file that lasts as long as the block: a node that does not see it does not share storage."""
        assert isinstance(self._storage, LocalStorage)
        name = f"probe-{secrets.token_hex(8)}"
        self._storage.write(name, b"")
        try:
            yield str(Path(self.url) / name)
        finally:
            self._storage.remove(name)

    # Reading

    def read_job(self) -> JobConfig | None:
        data = self._storage.read("job.yaml")
        try:
            return None if data is None else JobConfig.from_text(data.decode())
        except ValueError as error:
            raise RunRefused(f"{self.location('job.yaml')} cannot be read: {_brief(error)}") from None

    def read_plans(self) -> dict[int, Any]:
        return {int(generation): plan for generation, plan in self._read_json("plan.json").get("plans", {}).items()}

    def read_environment(self) -> dict[str, Any]:
        return self._read_json("environment.json")

    def read_metrics(self) -> list[dict[str, Any]]:
        """One line per committed step, in order of steps. A step that was run again counts with its last generation."""
        by_step: dict[int, dict[str, Any]] = {}
        for line in self._metrics.read():
            known = by_step.get(line["step"])
            if known is None or line["generation"] >= known["generation"]:
                by_step[line["step"]] = line
        return [by_step[step] for step in sorted(by_step)]

    def read_events(self) -> list[dict[str, Any]]:
        return self._events.read()

    def _write_json(self, name: str, data: Mapping[str, Any]) -> None:
        self._storage.write(name, json.dumps({"format": FORMAT, **data}, indent=1).encode())

    def _read_json(self, name: str) -> dict[str, Any]:
        data = self._storage.read(name)
        try:
            return {} if data is None else dict(json.loads(data))
        except (ValueError, TypeError) as error:
            raise RunRefused(f"{self.location(name)} is damaged: {_brief(error)}") from None


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())


def new_run_name() -> str:
    """For a job without ``run.name``: the time, and a few letters so that two at once differ."""
    return f"planaria-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
