"""``planaria demo``: the main job on a cluster of four Ray nodes on this machine, one of which is killed on the way.

The script only makes things happen. What it prints at the end is read from the run's files.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import click

from orchestrator.config import JobConfig
from orchestrator.local_cluster import LocalCluster, local_cluster
from orchestrator.runfolder import RunFolder, new_run_name
from orchestrator.summary import summarise
from orchestrator.trainer import ElasticTrainer, JobEnd

_KILL_AFTER_STEP = 12
_RETURN_AFTER_STEPS = 3  # after the first step on the smaller cluster
_STEPS_AFTER_REGROWTH = 10
_MAX_STEPS = 400  # the demo stops itself long before, once it has regrown


def demo_job(text: tuple[str, ...] | None) -> JobConfig:
    """A decoder of some 5 million parameters; eight workers, and six when a node is gone."""
    return JobConfig.from_dict(
        {
            "run": {"name": new_run_name().replace("planaria", "demo"), "storage_path": "runs"},
            "scaling": {"num_workers": [4, 8]},
            "layout": ["dp2·tp2·pp2", "dp3·pp2", "dp2·pp2"],
            "model": {"dim": 256, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 704},
            "data": {"text": list(text) if text else "stdlib", "seq_len": 128, "vocab_size": 4096},
            "training": {"max_steps": _MAX_STEPS, "global_batch_rows": 12, "micro_batch_rows": 2},
            "optimizer": {"lr": 2e-3, "warmup_steps": 10, "decay_steps": 200},
            "orphan_grace_s": 20.0,
        }
    )


def run_demo(text: tuple[str, ...] | None, as_json: bool) -> int:
    """Run the main job and print what its files say. Returns the exit code."""
    job = demo_job(text)
    assert job.run.name is not None
    folder = RunFolder(job.run.storage_path, job.run.name)
    say = (lambda line: None) if as_json else click.echo
    say("starting four Ray nodes on this machine, two workers each")
    with local_cluster(num_nodes=3, cpus_per_node=2) as cluster:
        (victim,) = cluster.add_nodes(1)
        driver = _Driver(job, cluster.address, say)
        driver.start()
        try:
            _direct(driver, cluster, victim, folder, say)
        except KeyboardInterrupt:
            say("stopping after a checkpoint")
            folder.request_stop()
        driver.join()
    if driver.end is None or driver.end.error is not None:
        click.echo(f"planaria: {driver.failure or driver.end.error}", err=True)
        return 1
    summary = summarise(folder)
    click.echo(json.dumps(summary, indent=1) if as_json else _describe(summary))
    return 0


def _direct(driver: _Driver, cluster: LocalCluster, victim: Any, folder: RunFolder, say: Any) -> None:
    """Kill a node in the middle of a step, bring one back, and end the job once it has regrown."""
    driver.wait_until(lambda lines: len(lines) >= _KILL_AFTER_STEP)
    # Half a step after a step's end is the middle of the next one.
    time.sleep(statistics.median(line["step_time_s"] for line in driver.lines[1:]) / 2)
    say("-- SIGKILL to every process of one node, in the middle of a step")
    cluster.kill_node(victim)
    full = driver.lines[-1]["world_size"]
    driver.wait_until(lambda lines: sum(line["world_size"] < full for line in lines) >= _RETURN_AFTER_STEPS)
    say("-- the node comes back; training goes on while its workers warm up")
    cluster.add_nodes(1)
    driver.wait_until(
        lambda lines: (
            any(line["world_size"] < full for line in lines[-_STEPS_AFTER_REGROWTH - 1 :])
            and all(line["world_size"] == full for line in lines[-_STEPS_AFTER_REGROWTH:])
        )
    )
    folder.request_stop()


class _Driver(threading.Thread):
    """The job's driver. The demo's main thread makes things happen beside it, since only that may start Ray nodes."""

    def __init__(self, job: JobConfig, address: str, say: Any) -> None:
        super().__init__(name="driver", daemon=True)
        self._job, self._address, self._say = job, address, say
        self._changed = threading.Condition()
        self._ended = False
        self.lines: list[dict[str, Any]] = []
        self.end: JobEnd | None = None
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self.end = ElasticTrainer(self._job).run(address=self._address, on_step=self._on_step)
        except Exception as error:
            self.failure = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _on_step(self, line: dict[str, Any]) -> None:
        if "message" in line:
            self._say(line["message"])
            return
        self._say(
            f"step {line['step']:3d}  loss {line['loss']:.4f}  {line['step_time_s']:.2f} s  "
            f"{line['layout']} on {line['world_size']} workers"
        )
        with self._changed:
            self.lines.append(line)
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Wait for the steps so far to meet ``condition``, or for the job's end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or condition(self.lines))


def _describe(summary: dict[str, Any]) -> str:
    incidents = [
        f"  {incident['kind']}: {incident['layout_before']} -> {incident['layout_after']}, state from "
        f"{incident['source_tier']}, {incident['seconds']:.2f} s, {incident['steps_run_again']} steps run again, "
        f"{incident['bytes_moved'] / 1e6:.1f} MB moved (at least {incident['bytes_lower_bound'] / 1e6:.1f})"
        for incident in summary["incidents"]
    ]
    phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in summary["phase_seconds"].items())
    return "\n".join(
        [
            "",
            f"steps                        {summary['steps']}",
            f"incidents                    {len(incidents)}",
            *incidents,
            f"seconds by phase             {phases}",
            f"samples lost / repeated      {summary['samples_lost']} / {summary['samples_repeated']}",
            f"committed steps run again    {summary['steps_run_again']}",
            f"final loss                   {summary['final_loss']:.4f}",
            f"the run's folder             {summary['path']}",
        ]
    )
