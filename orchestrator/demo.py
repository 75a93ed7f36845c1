"""``planaria demo``: the main job on a cluster of four Ray nodes on this machine, one of which is killed on the way.

The script only makes things happen. What it prints at the end is read from the run's files.
"""

from __future__ import annotations

import json
import statistics
import threading
from typing import Any

import click

from orchestrator.config import JobConfig
from orchestrator.local_cluster import LocalCluster, local_cluster
from orchestrator.runfolder import RunFolder, new_run_name
from orchestrator.summary import summarise
from orchestrator.trainer import ElasticTrainer

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
    job = demo_job(text)
    say = (lambda line: None) if as_json else click.echo
    say("starting four Ray nodes on this machine, two workers each")
    finished = threading.Event()
    with local_cluster(num_nodes=1, cpus_per_node=2) as cluster:
        cluster.add_nodes(2)
        (victim,) = cluster.add_nodes(1)
        assert job.run.name is not None
        folder = RunFolder(job.run.storage_path, job.run.name)
        director = _Director(cluster, victim, folder, say, finished)
        director.start()
        end = ElasticTrainer(job).run(address=cluster.address, on_step=director.on_step)
    finished.set()
    if end.error is not None:
        click.echo(f"planaria: {end.error}", err=True)
        return 1
    summary = summarise(folder)
    click.echo(json.dumps(summary, indent=1) if as_json else _describe(summary))
    return 0


class _Director(threading.Thread):
    """Kills a node in the middle of a step, brings one back, and ends the job once it has regrown."""

    def __init__(
        self, cluster: LocalCluster, victim: Any, folder: RunFolder, say: Any, finished: threading.Event
    ) -> None:
        super().__init__(name="director", daemon=True)
        self._cluster, self._victim, self._folder, self._say = cluster, victim, folder, say
        # The kernel ends a node's processes with the thread that started them, so this one waits for the end.
        self._finished = finished
        self._changed = threading.Condition()
        self._lines: list[dict[str, Any]] = []

    def on_step(self, line: dict[str, Any]) -> None:
        if "message" in line:
            self._say(line["message"])
            return
        self._say(
            f"step {line['step']:3d}  loss {line['loss']:.4f}  {line['step_time_s']:.2f} s  "
            f"{line['layout']} on {line['world_size']} workers"
        )
        with self._changed:
            self._lines.append(line)
            self._changed.notify_all()

    def run(self) -> None:
        self._wait_for(lambda: self._last["step"] >= _KILL_AFTER_STEP)
        # Half a step after a step's end is the middle of the next one.
        self._finished.wait(statistics.median(line["step_time_s"] for line in self._lines) / 2)
        self._say("-- SIGKILL to every process of one node, in the middle of a step")
        self._cluster.kill_node(self._victim)
        killed_in = self._last["generation"]
        self._wait_for(lambda: self._num_since(killed_in) >= _RETURN_AFTER_STEPS)
        self._say("-- the node comes back; training goes on while its workers warm up")
        self._cluster.add_nodes(1)
        self._wait_for(lambda: self._last["generation"] > killed_in and self._last["world_size"] == 8)
        shrunk = self._last["generation"] - 1
        self._wait_for(lambda: self._num_since(shrunk) >= _STEPS_AFTER_REGROWTH)
        self._folder.request_stop()
        self._finished.wait()

    @property
    def _last(self) -> dict[str, Any]:
        return self._lines[-1] if self._lines else {"step": 0, "generation": 0, "world_size": 0}

    def _num_since(self, generation: int) -> int:
        return sum(line["generation"] > generation for line in self._lines)

    def _wait_for(self, condition: Any) -> None:
        with self._changed:
            self._changed.wait_for(condition)


def _describe(summary: dict[str, Any]) -> str:
    incidents = [
        f"  {incident['kind']}: {incident['layout_before']} -> {incident['layout_after']}, state from "
        f"{incident['source_tier']}, {incident['seconds']:.2f} s, {incident['steps_run_again']} committed steps run again, "
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
