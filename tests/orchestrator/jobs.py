"""Tiny jobs for the end-to-end tests, and what happens to them on the way."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import safetensors.numpy

from checkpointing.durable import read_manifest
from checkpointing.publish import list_checkpoints
from orchestrator.cluster import connect
from orchestrator.config import JobConfig
from orchestrator.local_cluster import LocalCluster
from orchestrator.runfolder import RunFolder
from orchestrator.trainer import ElasticTrainer, JobEnd

Line = dict[str, Any]
# How far a loss may be from that of another layout, relative. `make prove` shows in fp64 that it is all rounding.
PRECISION, R = ("fp64", 1e-10) if os.environ.get("PLANARIA_PROVE") == "1" else ("fp32", 1e-5)
REFERENCE_STEPS = 150  # of the run of one worker: more than any run makes that is held against it


def write_text(folder: Path) -> Path:
    """Some 200 KB of real text: sources of the standard library, cut into files of a few KB."""
    source = Path(statistics.__file__).parent
    text = "".join((source / name).read_text() for name in ("statistics.py", "argparse.py", "ast.py"))
    target = folder / "text"
    target.mkdir()
    for index, start in enumerate(range(0, len(text), 4000)):
        (target / f"{index:03d}.txt").write_text(text[start : start + 4000])
    return target


def job(folder: Path, name: str, *overrides: str) -> JobConfig:
    """One worker unless ``overrides`` ("layout=dp2", ...) say otherwise; steps take tens of milliseconds."""
    data = {
        "run": {
            "name": name,
            "storage_path": str(folder / "runs"),
            "failure_config": {"detect_bound_s": 5.0},
        },
        "scaling": {"num_workers": 1, "standbys_per_node": 0},
        "layout": "1",
        "model": {"dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64},
        "data": {"text": str(folder / "text"), "seq_len": 32, "vocab_size": 512, "num_readers": 1},
        "training": {"max_steps": 25, "global_batch_rows": 12, "micro_batch_rows": 2, "precision": PRECISION},
        "optimizer": {"lr": 1e-3, "decay_steps": 1000},
        "orphan_grace_s": 5.0,
    }
    return JobConfig.from_dict(data, overrides)


class Drive:
    """A job driven to its end in this thread. ``on_step`` of a test sees every committed step as it is reported."""

    def __init__(self, config: JobConfig, cluster: LocalCluster, model: Any = None) -> None:
        assert config.run.name is not None
        self.cluster = cluster
        self.folder = RunFolder(config.run.storage_path, config.run.name)
        self._trainer = ElasticTrainer(config, model=model)

    def run(self, on_step: Callable[[Line], None] = lambda line: None, resume: bool = False) -> JobEnd:
        def steps_only(line: Line) -> None:
            if "step" in line:
                on_step(line)

        return self._trainer.run(resume=resume, address=self.cluster.address, on_step=steps_only)

    # What the run's files say

    @property
    def metrics(self) -> list[Line]:
        return self.folder.read_metrics()

    def all_metrics(self) -> list[Line]:
        """Also the lines of steps that were run again."""
        return [json.loads(line) for line in Path(self.folder.location("metrics.jsonl")).read_text().splitlines()]

    def events(self, kind: str) -> list[Line]:
        return [event for event in self.folder.read_events() if event["kind"] == kind]

    @property
    def incidents(self) -> list[Line]:
        return [event for event in self.folder.read_events() if "incident" in event]

    @property
    def checkpoints(self) -> list[str]:
        return list_checkpoints(self.folder.location("checkpoints"))

    @contextlib.contextmanager
    def when(self, happened: Callable[[list[Line]], bool], act: Callable[[], None]) -> Iterator[None]:
        """Beside the run: ``act`` once ``happened`` is true of the lines of events.jsonl. It must become true."""
        over = threading.Event()
        acted: list[BaseException | None] = []

        def watch() -> None:
            while not over.wait(0.01):
                if happened(self.folder.read_events()):
                    try:
                        act()
                        acted.append(None)
                    except BaseException as error:
                        acted.append(error)
                    return

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        assert acted == [None], acted

    # Where its processes are

    @property
    def members(self) -> list[Line]:
        """Rank -> {"worker", "node", "buddies"} in the newest plan."""
        return self.folder.read_plans()[max(self.folder.read_plans())]["members"]

    def pids(self, generation: int | None = None) -> list[int]:
        """Process of each rank of a generation, by default the newest."""
        plans = self.folder.read_plans()
        known = {event["worker"]: event["pid"] for event in self.events("worker_ready")}
        return [known[member["worker"]] for member in plans[generation or max(plans)]["members"]]

    def signal_worker(self, rank: int, number: int = signal.SIGKILL) -> int:
        """Returns the process's id."""
        pid = self.pids()[rank]
        psutil.Process(pid).send_signal(number)
        return pid

    def node_processes(self, node: str) -> list[psutil.Process]:
        """This job's processes on a node: its keeper first, then workers and standbys. (Readers are not a node's.)"""
        found = [(p, kind) for p in self.cluster.processes(self.cluster_node(node)) if (kind := actor_kind(p))]
        return [p for wanted in ("KeeperActor", "WorkerActor") for p, kind in found if kind == wanted]

    def readers(self) -> list[psutil.Process]:
        everywhere = [p for node in self.cluster.nodes for p in self.cluster.processes(node)]
        return [p for p in everywhere if actor_kind(p) == "ReaderActor"]

    @property
    def mortal(self) -> list[str]:
        """Names of the nodes in the newest plan but for the cluster's head, without which there is no cluster."""
        head = self.cluster.nodes[0]
        names = dict.fromkeys(member["node"] for member in self.members)
        return [name for name in names if self.cluster_node(name) is not head]

    def cluster_node(self, node: str) -> Any:
        """The handle of the Ray node that the run calls ``node``."""
        ray_id = next(event["ray_node"] for event in self.events("node_admitted") if event["node"] == node)
        return next(handle for handle in self.cluster.nodes if handle.node_id == ray_id)


def left_behind(cluster: LocalCluster) -> list[str]:
    """What a job leaves on the cluster: processes of ours, named actors, placement groups. Waits for what is going."""
    deadline = time.monotonic() + 15
    with connect(cluster.address):
        while found := _still_there(cluster):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
    return found


def _still_there(cluster: LocalCluster) -> list[str]:
    processes = [p for node in cluster.nodes for p in cluster.processes(node)]
    groups = ray.util.placement_group_table().items()
    return [
        *(f"process {p.pid} ({kind})" for p in processes if (kind := actor_kind(p))),
        *(f"actor {actor['name']}" for actor in ray.util.list_named_actors(all_namespaces=True)),
        *(f"placement group {group}" for group, facts in groups if facts["state"] != "REMOVED"),
    ]


def actor_kind(process: psutil.Process) -> str | None:
    """ "KeeperActor", "WorkerActor" or "ReaderActor" for a process of ours, as Ray titles it."""
    with contextlib.suppress(psutil.Error, IndexError):
        kind = re.match(r"ray::(?:[^:]*:)?(\w+Actor)\b", process.cmdline()[0])
        return kind[1] if kind else None
    return None


def wait_until(happened: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL in one go."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def assert_every_step_once(metrics: list[Line], last: int) -> None:
    assert [line["step"] for line in metrics] == list(range(1, last + 1))


def assert_same_course(metrics: list[Line], reference: list[Line], r: float = R) -> None:
    """The same batches at every step, and losses within ``r``, as far as the shorter of the two goes."""
    for line, expected in zip(metrics, reference, strict=False):
        assert line["batch_digest"] == expected["batch_digest"], f"another batch at step {line['step']}"
        distance = abs(line["loss"] - expected["loss"]) / abs(expected["loss"])
        assert distance <= r, f"the loss of step {line['step']} ({line['layout']}) is off by {distance:.2g}"


def whole_state(checkpoint: str) -> dict[str, np.ndarray]:
    """A checkpoint's tensors put together again from their pieces, whatever the layout was."""
    manifest = read_manifest(checkpoint)
    whole: dict[str, np.ndarray] = {}
    for entry in manifest["files"]:
        parts = safetensors.numpy.load_file(Path(checkpoint) / entry["file"])
        for piece in entry["pieces"]:
            part = parts[piece["name"]]
            target = whole.setdefault(piece["name"], np.empty(manifest["tensors"][piece["name"]]["shape"], part.dtype))
            box = tuple(slice(at, at + n) for at, n in zip(piece["offset"], piece["size"], strict=True))
            target[box] = part
    return whole


def assert_bitwise_equal(ours: str, other: str) -> None:
    first, second = whole_state(ours), whole_state(other)
    assert first.keys() == second.keys()
    differing = [name for name in first if first[name].tobytes() != second[name].tobytes()]
    assert not differing, f"{len(differing)} of {len(first)} tensors differ: {differing[:3]}"


def phases(incident: Line) -> str:
    """For people: where an incident's seconds went."""
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in incident["phases"].items())
    return f"{incident['layout_before']} -> {incident.get('layout_after')}: {incident['seconds']:.2f} s ({parts})"
