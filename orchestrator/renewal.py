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
    taken the run's lease, ``stop`` says so and nothing is renewed any more.
    """
    ended = threading.Event()

    def renew() -> None:
        under_way: list[tuple[Any, Any]] = []
        while not ended.wait(min(_MOST_S, orphan_grace_s / 4)):
            try:
                folder.renew()
            except LeaseLost as lost:
                stop.lost(str(lost))
                return
            readers.forget({actor for actor, ref in under_way if _failed(ref)})
            nodes.renew()
            under_way = readers.renew()

    thread = threading.Thread(target=renew, name="renewal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _failed(ref: Any) -> bool:
    if not ray.wait([ref], timeout=0)[0]:
        return False
    try:
        ray.get(ref)
    except ray.exceptions.RayError:
        return True
    return False
