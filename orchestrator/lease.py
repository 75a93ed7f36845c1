"""Who drives a run. One small object per epoch, created exclusively; the highest epoch is the lease.

To take over is to create the next epoch, so one of two rivals wins on any storage that offers exclusive creation, and
an older driver finds out at its next renewal.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from checkpointing.storage import Storage
from orchestrator.lines import FORMAT


class LeaseLost(RuntimeError):
    """Another driver has taken over the run; this one must stop without touching anything."""


@dataclass(frozen=True)
class Lease:
    """epoch    1, 2, ...: one per driver of the run
    owner    "<host id>:<pid>:<process start>" of the driver
    host     host name, for people
    expires  seconds since 1970 after which the driver counts as dead
    ttl_s    how far each renewal moves that
    status   "running", "finished", "stopped" or "failed"
    """

    epoch: int
    owner: str
    host: str
    expires: float
    ttl_s: float
    status: str = "running"

    @property
    def live(self) -> bool:
        """Whether its driver may still be at work. A driver of this host that is gone is known to be dead at once."""
        if self.status != "running" or time.time() >= self.expires:
            return False
        host, pid, started = self.owner.rsplit(":", 2)
        return host != _host_id() or _started(int(pid)) == started


def read_lease(storage: Storage) -> Lease | None:
    """The newest lease, or None."""
    for name in reversed(storage.names("lease")):
        data = storage.read(name)
        if data:
            fields = json.loads(data)
            return Lease(**{key: fields[key] for key in Lease.__dataclass_fields__})
    return None


def take_lease(storage: Storage, before: Lease | None, ttl_s: float) -> Lease | None:
    """Create the epoch after ``before``; None when a rival was faster."""
    epoch = before.epoch + 1 if before else 1
    owner = f"{_host_id()}:{os.getpid()}:{_started(os.getpid())}"
    lease = Lease(epoch, owner, socket.gethostname(), time.time() + ttl_s, ttl_s)
    return lease if storage.create(_name(lease), _encode(lease)) else None


def renew_lease(storage: Storage, lease: Lease, status: str = "running") -> Lease:
    """Move the expiry (or write the final ``status``). Raises LeaseLost when a higher epoch exists, or none."""
    newest = storage.names("lease")[-1:]
    if not newest:
        raise LeaseLost("the run's folder was taken away while its driver was at work")
    if newest != [_name(lease)]:
        raise LeaseLost(f"another driver has taken over this run (epoch {lease.epoch} is no longer the newest)")
    renewed = replace(lease, expires=time.time() + lease.ttl_s, status=status)
    storage.write(_name(renewed), _encode(renewed))
    return renewed


def _name(lease: Lease) -> str:
    return f"lease/{lease.epoch:08d}.json"


def _encode(lease: Lease) -> bytes:
    return json.dumps({"format": FORMAT, **asdict(lease)}).encode()


def _host_id() -> str:
    """The kernel's boot id and the pid namespace, in which a pid has one meaning; elsewhere the host's name."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.exists() and namespace.is_symlink():
        return f"{boot.read_text().strip()}/{os.readlink(namespace)}"
    return socket.gethostname()


def _started(pid: int) -> str | None:
    """When the process began (pids are used again), or None when there is no such living process."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.NoSuchProcess:
        return None
