"""Keeps the leases of a job's actors and of its run folder alive while the driver lives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import ray

from orchestrator.lease import LeaseLost
from orchestrator.nodes import Nodes
from orchestrator.readers import Readers
from orchestrator.runfolder import RunFolder
from orchestrator.stop import StopRequest

_MOST_S = 3.0


@contextlib.contextmanager
def renewing(
    nodes: Nodes, readers: Readers, folder: RunFolder, stop: StopRequest, orphan_grace_s: float
) -> Iterator[None]:
    """Renew everything several times per grace period, on a thread of its own, until the block ends.

    A reader whose renewal fails is dead and is forgotten, so that the controller replaces it. When another driver has
    taken the run's lease, ``stop`` says so and nothing is renewed any more. Storage that is away for a while, which may
    keep a call waiting, costs the actors nothing: the run's lease has a thread of its own, and is renewed later.
    """
    ended = threading.Event()
    every_s = min(_MOST_S, orphan_grace_s / 4)

    def renew_lease() -> None:
        while not ended.wait(every_s):
            try:
                folder.renew()
            except LeaseLost as lost:
                stop.lost(str(lost))
                return
            except OSError:
                continue

    def renew() -> None:
        under_way: list[tuple[Any, Any]] = []
        while leasing.is_alive() and not ended.wait(every_s):
            readers.forget({actor for actor, ref in under_way if _failed(ref)})
            nodes.renew()
            under_way = readers.renew()

    leasing = threading.Thread(target=renew_lease, name="lease", daemon=True)
    renewal = threading.Thread(target=renew, name="renewal", daemon=True)
    leasing.start()
    renewal.start()
    try:
        yield
    finally:
        ended.set()
        renewal.join()
        leasing.join()


def _failed(ref: Any) -> bool:
    if not ray.wait([ref], timeout=0)[0]:
        return False
    try:
        ray.get(ref)
    except ray.exceptions.RayError:
        return True
    return False
