"""Calls to other actors from the training thread, which must never outlive its generation."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import ray

from workers.fence import Fence


def wait_for(ref: ray.ObjectRef, fence: Fence) -> Any:
    """``ray.get`` that raises Fenced within milliseconds of a trip."""
    done = threading.Event()
    with fence.waking(done):
        ref.future().add_done_callback(lambda _: done.set())
        done.wait()
    if not ray.wait([ref], timeout=0)[0]:
        fence.check()
    return ray.get(ref)


class RendezvousClient:
    """The rendezvous of one generation: requests go to a keeper, as actor calls, so no socket of our own is open."""

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper
        self.local_host = ray.util.get_node_ip_address()

    def request(self, parts: Sequence[bytes], fence: Fence) -> list[bytes]:
        """Send one request to the keeper's `Spaces` and return its answer."""
        return wait_for(self._keeper.rendezvous.remote(list(parts)), fence)
