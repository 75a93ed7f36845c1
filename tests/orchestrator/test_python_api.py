"""The Python API: a user's own module, Ray Train's configuration classes, callbacks in the driver, and the result."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray
import ray.train

from orchestrator import ElasticTrainer, FailureConfig, JobConfig, RunConfig, ScalingConfig
from orchestrator.callbacks import Callbacks, RunContext
from orchestrator.config_errors import ConfigError
from orchestrator.local_cluster import local_cluster
from orchestrator.one_place import package_in_the_way
from orchestrator.own_model import find_build

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of one node, whose processes find our code whatever folder the driver is in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with local_cluster(num_nodes=1, cpus_per_node=4) as cluster:
            yield cluster.address


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


class Notes(ray.train.UserCallback):
    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.reports: list[tuple[Any, list[dict[str, Any]], Any]] = []
        self.exceptions: list[dict[int, Exception]] = []

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        self.pids.add(os.getpid())
        self.reports.append((run_context, metrics, checkpoint))

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self.exceptions.append(worker_exceptions)


def test_own_module_with_rays_configuration(address: str, tmp_path: Path) -> None:
    """The example's module under Ray's ScalingConfig and RunConfig: every field of the result, every callback."""
    notes = Notes()
    job = JobConfig(
        run=ray.train.RunConfig(
            name="own",
            storage_path=str(tmp_path),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
            callbacks=[notes],
        ),
        scaling=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        data={"text": str(ROOT / "pipelines"), "seq_len": 32, "vocab_size": 300},
        training={"max_steps": 6, "global_batch_rows": 4},
    )
    model = load(ROOT / "examples" / "own_module.py")
    result = ElasticTrainer(job, model=model.build).fit(address=address)

    assert isinstance(result, ray.train.Result)
    assert result.error is None and result.incidents == []
    assert result.path == str(tmp_path / "own")
    assert result.metrics["step"] == 6 and result.metrics["layout"] == "dp2"
    assert list(result.metrics_dataframe["step"]) == [1, 2, 3, 4, 5, 6]
    assert result.metrics_dataframe["loss"].iloc[-1] < result.metrics_dataframe["loss"].iloc[0]
    with result.checkpoint.as_directory() as folder:
        assert (Path(folder) / "COMMITTED").exists() and Path(folder).name == "step-00000006"

    assert notes.pids == {os.getpid()} and notes.exceptions == []
    lines = [metrics for _, [metrics], _ in notes.reports]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 6], "the last one again, with its checkpoint"
    assert lines[-1]["loss"] == result.metrics["loss"]
    checkpoints = [checkpoint for _, _, checkpoint in notes.reports]
    assert checkpoints[:-1] == [None] * 6 and checkpoints[-1].path == result.checkpoint.path
    context = notes.reports[0][0]
    assert context.run_id == "own" and context.get_run_config().name == "own"


def test_a_model_beside_the_yaml_that_fails(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job ends by equal failures; its own modules travel to workers that see neither file nor folder."""
    model = tmp_path / "job" / "nets"
    model.mkdir(parents=True)
    (model / "__init__.py").touch()
    (model / "layers.py").write_text(
        "from torch import nn\n"
        "class Broken(nn.Embedding):\n"
        "    def forward(self, tokens):\n"
        "        return super().forward(tokens)[:, :-1]\n"
    )
    (model / "lm.py").write_text(
        "from .layers import Broken\ndef build(vocab_size, seq_len):\n    return Broken(vocab_size, vocab_size)\n"
    )
    monkeypatch.chdir(tmp_path)
    notes = Notes()
    job = JobConfig(
        run=RunConfig(
            name="broken",
            storage_path=str(tmp_path),
            failure_config=FailureConfig(max_identical_failures=2),
            callbacks=[notes],
        ),
        scaling=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.5}, standbys_per_node=0),
        model="nets.lm:build",
        data={"text": str(ROOT / "pipelines"), "seq_len": 32, "vocab_size": 300},
        training={"max_steps": 6, "global_batch_rows": 4},
    )
    said: list[str] = []

    def say(line: dict[str, Any]) -> None:
        said.append(line["message"])

    result = ElasticTrainer(job, folders=[tmp_path / "job"]).fit(address=address, on_step=say)
    assert "the model returned a tensor [2, 31, 300]; it must return logits [2, 32, 300]" in str(result.error)
    assert result.checkpoint is None and result.metrics == {}
    assert [incident["outcome"] for incident in result.incidents] == ["superseded", "ended"]
    assert [set(exceptions) for exceptions in notes.exceptions] == [{0}, {0}]
    assert "the model returned a tensor" in str(notes.exceptions[0][0])
    assert all("\n" not in sentence for sentence in said)
    assert len([sentence for sentence in said if sentence.startswith("incident ")]) == 2


def test_ranks_of_what_was_lost() -> None:
    notes = Notes()
    job = JobConfig.from_dict({"scaling": {"num_workers": 2}, "training": {"max_steps": 5}})
    assert job.scaling is not None
    callbacks = Callbacks([notes], RunContext("run", job.run, job.scaling))
    members = [{"worker": f"node-{n}/0"} for n in (1, 2, 3)]
    callbacks.on_event({"kind": "plan", "generation": 1, "members": members})
    callbacks.on_event({"kind": "plan", "generation": 2, "members": members[:2]})
    lost = {"kind": "failure", "generation_before": 1, "cause": "rank 0 on node-1: a peer is gone", "nodes": []}
    callbacks.on_event({**lost, "workers": ["node-2/0", "node-3/0", "node-3/1"]})
    callbacks.on_event({**lost, "workers": []})
    assert [set(exceptions) for exceptions in notes.exceptions] == [{1, 2}, {0}]


def test_callbacks_are_kept_out_of_yaml() -> None:
    notes = Notes()
    job = JobConfig(run=RunConfig(callbacks=[notes]), scaling=ScalingConfig(), training={"max_steps": 1})
    assert "callbacks" not in job.to_yaml()
    assert job.with_overrides(["training.max_steps=2"]).resolved().run.callbacks == (notes,)
    with pytest.raises(ConfigError, match="callbacks holds 'wandb'; allowed: ray.train.UserCallback objects"):
        JobConfig.from_text("{run: {callbacks: [wandb]}, scaling: {num_workers: 1}, training: {max_steps: 1}}")


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"model 'nowhere:build' cannot be imported from {tmp_path}: No module named"):
        find_build("nowhere:build", [tmp_path])
    (tmp_path / "somewhere.py").touch()
    with pytest.raises(ValueError, match="has no attribute 'build'"):
        find_build("somewhere:build", [tmp_path])
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("1 / 0", "cannot be imported from .*: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "cannot be imported from .*: SystemExit: 3"),
        ("def build(:", "cannot be imported from .*: SyntaxError: invalid syntax"),
        ("build = 5", "is int; it must be a function build"),
    ],
)
def test_a_model_whose_module_is_broken(source: str, sentence: str, tmp_path: Path) -> None:
    module = f"broken_{abs(hash(source))}"  # Python keeps what it has imported
    (tmp_path / f"{module}.py").write_text(source)
    with pytest.raises(ValueError, match=sentence):
        find_build(f"{module}:build", [tmp_path])


@pytest.mark.parametrize("kind", ["package", "module", "folder"])
def test_what_ray_would_import_instead_of_us(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's processes look into the driver's current folder first, also when the driver itself does not."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / ("pipelines.py" if kind == "module" else "pipelines")
    if kind != "module":
        path.mkdir()
    (path / "__init__.py" if kind == "package" else path / "notes.txt" if kind == "folder" else path).touch()
    problem = package_in_the_way()
    if kind == "folder":
        assert problem is None, "Python passes over a folder that is no package"
    else:
        assert problem is not None and str(path) in problem and "is in the way" in problem


@pytest.mark.parametrize("example", ["quick.yaml", "hybrid.yaml"])
def test_examples_are_valid(example: str) -> None:
    job = JobConfig.from_yaml(ROOT / "examples" / example)
    assert JobConfig.from_text(job.to_yaml()) == job


def run_example(*command: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_example_own_module(tmp_path: Path, address: str) -> None:
    small = ["training.max_steps=3", f"data.text={ROOT / 'pipelines'}", "data.vocab_size=300"]
    out = run_example(str(ROOT / "examples" / "own_module.py"), *small, cwd=tmp_path)
    assert " in 3 steps, 0 incidents" in out and "checkpoint: " in out


@pytest.mark.parametrize(
    ("example", "layout", "size"),
    [("quick.yaml", "dp2", ()), ("hybrid.yaml", "pp2·tp2", ("layout=tp2.pp2", "scaling.num_workers=4"))],
)
def test_example(example: str, layout: str, size: tuple[str, ...], tmp_path: Path, address: str) -> None:
    """The examples with fewer steps of fewer tokens on fewer workers, half a CPU each."""
    small = [*size, "training.max_steps=2", "training.eval_every=0", f"data.text={ROOT / 'pipelines'}"]
    small += ["data.vocab_size=512", "data.seq_len=32", "model.dim=64", "data.num_readers=1"]
    small += ["scaling.resources_per_worker={CPU: 0.5}", "scaling.standbys_per_node=0"]
    options = [part for setting in small for part in ("--set", setting)]
    job = str(ROOT / "examples" / example)
    out = run_example("-m", "orchestrator", "train", job, "--address", address, *options, cwd=tmp_path)
    assert f"{layout} on " in out and "finished at step 2" in out
