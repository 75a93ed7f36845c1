"""Attach to a Ray cluster, or start a local one; see what nodes it has."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

from orchestrator.actors import NAMESPACE
from orchestrator.scratch import ray_files

DOMAIN_LABEL = "planaria.io/failure-domain"
_ANSWER_S = 5.0


@dataclass(frozen=True)
class RayNode:
    """One living node of the cluster. ``free`` is what nobody has reserved, in Ray's units."""

    ray_id: str
    address: str
    labels: dict[str, str]
    free: dict[str, float]

    @property
    def domain(self) -> str:
        """The failure domain: the node itself unless a label names a wider one."""
        return self.labels.get(DOMAIN_LABEL, self.ray_id)


@contextlib.contextmanager
def connect(address: str | None, say: Callable[[str], None] = lambda message: None) -> Iterator[None]:
    """Attach to ``address`` (or RAY_ADDRESS, or the job's own cluster); start a local cluster when there is none named.

    A local cluster ends with this context; that it starts, which takes seconds, is said. Raises ValueError with a
    sentence when the address does not answer or speaks another version of Ray.
    """
    wanted = address or os.environ.get("RAY_ADDRESS") or "local"
    if wanted.startswith(("http://", "https://")):
        raise ValueError(
            f"{wanted} is the dashboard of a Ray cluster, which is for 'ray job submit'; to train from here, give the "
            "address of its head (--address HOST:6379, or auto on one of its nodes)"
        )
    _refuse_dead(wanted)
    if wanted == "local":
        say("starting Ray on this machine")
        with ray_files(), _initialised(wanted, include_dashboard=False):
            yield
    else:
        with _initialised(wanted):
            yield


@contextlib.contextmanager
def _initialised(wanted: str, **options: Any) -> Iterator[None]:
    try:
        ray.init(wanted, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **options)
    except RuntimeError as error:
        if "ersion mismatch" in str(error):
            raise ValueError(f"the cluster at {wanted} runs another version of Ray or Python: {error}") from None
        raise
    except ConnectionError as error:
        raise ValueError(f"no Ray cluster answers at {wanted}: {error}") from None
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        raise ConnectionError(f"Ray did not start in time (is this machine very busy?): {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _refuse_dead(address: str) -> None:
    """Ray itself tries for two minutes, and then ends the process."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()) or "://" in address:
        return
    try:
        socket.create_connection((host, int(port)), _ANSWER_S).close()
    except OSError as error:
        raise ValueError(f"no Ray cluster answers at {address}: {error}") from None


def lasting_path(path: str) -> str:
    """``path`` itself; inside a Ray job a relative one counts from the home folder.

    A job's working folder is a copy that Ray removes when the job has ended, and a run must outlive its driver.
    """
    settings = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}"))
    in_copy = bool((settings.get("runtime_env") or {}).get("working_dir"))
    return str(Path.home() / path) if in_copy and "://" not in path and not path.startswith("~") else path


def living_nodes() -> list[RayNode]:
    """The cluster's living nodes, in the order of their addresses and ids."""
    free = ray._private.state.available_resources_per_node()
    nodes = [
        RayNode(
            node["NodeID"], node["NodeManagerAddress"], dict(node.get("Labels") or {}), free.get(node["NodeID"], {})
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.address, node.ray_id))
