"""JobConfig: prints itself back, resumes what may be resumed, and says what is wrong in one sentence."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from checkpointing.layout import Layout
from orchestrator.config import TUNING_KEYS, JobConfig, candidate_layouts
from orchestrator.config_errors import ConfigError, known_keys
from orchestrator.config_sections import ScalingConfig
from orchestrator.config_yaml import dump_yaml, load_yaml
from workers.limits import layout_problem

MINIMAL: dict[str, Any] = {"scaling": {"num_workers": 8}, "training": {"max_steps": 5}}

names = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=12).filter(
    lambda s: s[0] not in "._-"
)
# Text that YAML could take for something else, beside any text at all.
texts = st.one_of(
    st.sampled_from(["1e5", "1e-3", "null", "yes", "0x10", "1_000", "12:30", "~", "2026-01-01", "- a", "a: b", " "]),
    st.sampled_from(["\x85", "a\u2028b", "\ufeff", "\r\n"]),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
)
positive = st.floats(1e-12, 1e12)
shares = st.floats(0, 0.999)
jobs = st.fixed_dictionaries(
    {
        "run": st.fixed_dictionaries(
            {"name": names, "storage_path": st.just("runs")},
            optional={"failure_config": st.fixed_dictionaries({"detect_bound_s": positive})},
        ),
        "scaling": st.fixed_dictionaries(
            {"num_workers": st.integers(1, 9) | st.tuples(st.integers(1, 4), st.integers(4, 9))},
            optional={
                "label_selector": st.dictionaries(texts, texts, max_size=3),
                "resources_per_worker": st.dictionaries(texts, st.floats(0.1, 100), max_size=3),
                "accelerator_type": texts,
            },
        ),
        "layout": st.sampled_from(["auto", "1", ("1",)]),
        "training": st.fixed_dictionaries(
            {"max_steps": st.integers(1, 10**12)}, optional={"max_time_s": positive, "seed": st.integers(0, 2**63)}
        ),
        "optimizer": st.fixed_dictionaries({"lr": positive, "betas": st.tuples(shares, shares)}),
        "data": st.fixed_dictionaries({"text": texts | st.tuples(texts, texts)}),
        "protection": st.fixed_dictionaries({"snapshot_every": st.just("auto") | st.integers(1, 100)}),
    }
)


@given(jobs)
def test_a_job_prints_itself_back(data: dict[str, Any]) -> None:
    job = JobConfig.from_dict(data)
    assert JobConfig.from_text(job.to_yaml()) == job
    assert JobConfig.from_dict(job.to_dict()) == job


@given(
    st.recursive(texts | st.floats(allow_nan=False) | st.integers() | st.booleans() | st.none(), st.lists, max_leaves=6)
)
def test_yaml_reads_what_it_writes(value: Any) -> None:
    assert load_yaml(dump_yaml({"key": value})) == {"key": value}


def test_a_learning_rate_needs_no_dot() -> None:
    assert JobConfig.from_dict(MINIMAL, ["optimizer.lr=1e-3"]).optimizer.lr == 1e-3


def test_overrides_reach_missing_sections_and_list_items() -> None:
    job = JobConfig.from_dict({"training": {"max_steps": 5}}, ["groups=[{name: a}]", "groups.0.scaling.num_workers=3"])
    assert job.group.scaling.num_workers == 3
    assert job.with_overrides(["training.max_steps=7", "model.dim=64"]).training.max_steps == 7


leaves = [
    key for key in known_keys(JobConfig) if not any(other.startswith(f"{key}.") for other in known_keys(JobConfig))
]


def _get(job: JobConfig, key: str) -> Any:
    node: Any = job
    for part in key.split("."):
        node = node[int(part)] if isinstance(node, tuple) else getattr(node, part)
    return node


def _changed(job: JobConfig, key: str) -> JobConfig:
    """``job`` with another valid value at ``key``: the first that the configuration takes."""
    before = _get(job, key)
    for value in (
        7,
        8,
        4,
        10,
        1024,
        8192,
        0.5,
        0,
        3,
        "[0.5, 0.6]",
        "fp64",
        "gpipe",
        "parity",
        "abc",
        "true",
        "{a: b}",
        "{a: 1}",
        "[1, 9]",
        "1 MiB",
    ):
        try:
            other = job.with_overrides([f"{key}={value}"])
        except ConfigError:
            continue
        if _get(other, key) != before:
            return other
    raise AssertionError(f"no other value found for {key}")


# Keys of one value each that are no list's: of groups, layouts and rules there may be several.
single = [key for key in leaves if not key.startswith(("groups.", "layout", "run.checkpoint_config.keep."))]


@pytest.mark.parametrize("key", single)
def test_the_digest_covers_every_key_but_the_tuning_keys(key: str) -> None:
    job = JobConfig.from_dict(
        MINIMAL, ["scaling.num_workers=[1, 8]", "optimizer.decay_steps=6", "training.eval_every=1"]
    )
    other = _changed(job, key)
    may_change = key.startswith(tuple(f"{tuning}." for tuning in TUNING_KEYS)) or key in TUNING_KEYS
    assert (other.digest == job.digest) == may_change
    assert other.differences(job) == (() if may_change else (key,))


def test_layout_and_groups_may_change() -> None:
    job = JobConfig.from_dict(MINIMAL)
    grouped = JobConfig.from_dict({"groups": [{"name": "a", "layout": "dp2"}], "training": {"max_steps": 5}}, [
        "groups.0.scaling.num_workers=2"
    ])  # fmt: skip
    assert job.with_overrides(["layout=dp2·tp2"]).digest == grouped.digest == job.digest


def test_a_longer_run_keeps_its_schedule() -> None:
    first = JobConfig.from_dict(MINIMAL).resolved()
    longer = JobConfig.from_dict(MINIMAL, ["training.max_steps=9"])
    assert longer.digest != first.digest, "alone, the longer job decays over 9 steps"
    assert longer.resolved(first).decay_steps == 5
    assert longer.resolved(first).digest == first.digest
    bent = longer.with_overrides(["optimizer.decay_steps=9"]).resolved(first)
    assert bent.differences(first) == ("optimizer.decay_steps",)


def test_decay_steps_follow_from_tokens() -> None:
    job = JobConfig.from_dict({"scaling": {}, "training": {"max_tokens": 10_000, "global_batch_rows": 4}})
    assert job.decay_steps == 10  # 4 rows of 256 tokens a step


@given(st.sampled_from(leaves), st.data())
def test_a_misspelt_key_names_the_right_one(key: str, data: st.DataObject) -> None:
    section, _, name = key.rpartition(".")
    assume(len(name) > 5 and not key.startswith("groups"))
    index = data.draw(st.integers(1, len(name) - 2))
    wrong = name[:index] + name[index + 1 :]
    siblings = {other for other in leaves if other.rpartition(".")[0] == section}
    assume(f"{section}.{wrong}" not in siblings)
    with pytest.raises(ConfigError) as caught:
        JobConfig.from_dict(MINIMAL, [f"{section}.{wrong}=1" if section else f"{wrong}=1"])
    assert caught.value.key == (f"{section}.{wrong}" if section else wrong)
    assert f"did you mean {name}?" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["max_steps=3"], "max_steps (value 3) is not a known key; did you mean training.max_steps?"),
        (["training.zzz=3"], "training.zzz (value 3) is not a known key; known here: max_steps, max_tokens, "),
        (["training.max_steps='3'"], "training.max_steps is '3'; allowed: a whole number (at least 1), or null"),
        (["training.max_steps=0"], "training.max_steps is 0; allowed: a whole number (at least 1), or null"),
        (["training.precision=fp16"], "training.precision is 'fp16'; allowed: 'fp32' or 'bf16' or 'fp64'"),
        (["scaling.num_workers=many"], "scaling.num_workers is 'many'; allowed: a whole number, or a list of 2, "),
        (["scaling.num_workers=[8, 2]"], "scaling.num_workers is (8, 2); allowed: a whole number of at least 1, "),
        (["run.failure_config.max_failures=-2"], "run.failure_config.max_failures is -2; allowed: a whole number ("),
        (["optimizer.betas=0.9"], "optimizer.betas is 0.9; allowed: a list of 2, each a number"),
        (["optimizer.betas=[0.9, 1]"], "optimizer.betas is [0.9, 1.0]; allowed: two numbers from 0 to less than 1"),
        (["optimizer.lr=.inf"], "optimizer.lr is inf; allowed: finite numbers"),
        (["model=decoder"], "model is 'decoder'; allowed: a mapping of DecoderConfig or 'package.module:build'"),
        (["model=3"], "model is 3; allowed: a mapping with the keys dim, "),
        (["model=a:b", "model.dim=3"], "model.dim cannot be set: what holds 'dim' is 'a:b', not a mapping"),
        (["model.num_kv_heads=3"], "model.num_kv_heads is 3; allowed: a divisor of model.num_heads=8"),
        (["model.dim=250"], "model.dim is 250; allowed: an even multiple of model.num_heads=8"),
        (["layout=dp2·xp2"], "layout 'dp2·xp2': unknown axis 'xp'; the axes are"),
        (["layout=[]"], "layout is an empty list; allowed: a layout such as"),
        (["layout=dp5·tp2"], "layout dp5·tp2 needs 10 workers, more than scaling.num_workers=8"),
        (["layout=tp8"], "layout tp8 has tp8, which does not divide model.num_kv_heads=4"),
        (["layout=pp7"], "layout pp7 has 7 pipeline stages, more than model.num_layers=6"),
        (["layout=pp2:3+2"], "layout pp2:3+2 has stages of 3+2 layers; each needs one, and together model."),
        (["layout=pp2:6+0"], "layout pp2:6+0 has stages of 6+0 layers; each needs one"),
        (["layout=pp2:6"], "layout 'pp2:6': gives the layers of 1 stages, but pp*v is 2"),
        (["layout=dp2·cp2·ep2"], "layout dp2·cp2·ep2 has cp2 and ep2, which training cannot do yet; use pp, r, dp"),
        (["layout=dp2·ep3"], "layout 'dp2·ep3': ep*etp=3 does not divide the dp*cp*tp=2 ranks"),
        (["layout=dp8", "training.global_batch_rows=7"], "layout dp8 has 8 data ranks, more than training."),
        (["layout=dp8", "scaling.num_workers=[4, 8]"], "layout offers nothing for 4 workers (scaling.num_workers="),
        (["training.max_steps=null"], "training has no end: give at least one of training.max_steps, max_tokens"),
        (["training.max_steps=null", "training.max_time_s=9"], "optimizer.decay_steps is missing; it is needed when"),
        (["training.eval_every=5", "data.eval_fraction=0"], "data.eval_fraction is 0, so nothing is held out for"),
        (["protection.snapshot_every=0"], "protection.snapshot_every is 0; allowed: a whole number of at least 1, or"),
        (["scaling=null"], "scaling is missing; for example"),
        (["groups=[{name: a}]"], "groups and scaling are both given; a job has one of them"),
        (["scaling=null", "groups=[{}, {}]"], "groups has 2 entries; exactly one worker group is supported so far"),
        (["scaling=null", "groups=[{scalin: 3}]"], "groups.0.scalin (value 3) is not a known key; did you mean "),
        (["run.name=a/b"], "run.name is 'a/b'; allowed: at most 100 letters, digits"),
        ([f"run.name={'n' * 101}"], f"run.name is '{'n' * 101}'; allowed: at most 100 letters"),
        (["scaling.resources_per_worker={CPU: 0}"], "scaling.resources_per_worker asks for nothing; a worker needs"),
        (["layout=dp99999999999999"], "layout 999999999…: a size of 14 digits is too large"),
        (["run.storage_path='s3://key:word@bucket/x'"], "run.storage_path holds a password"),
        (["nothing"], "--set nothing: write it as key=value"),
        (["training={a: 1, a: 2}"], "a is given twice"),
        (["training=[1"], "this is not YAML"),
        (["training=\0"], "this is not YAML: unacceptable character"),
        (["run={2020-01-01: 3}"], "2020-01-01 is not text; keys of a job are text"),
        (["run=&a [*a]"], "a job is nested too deeply, or a YAML alias in it holds itself"),
        (["run=" + "[" * 5000], "this YAML is nested too deeply"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        JobConfig.from_dict(MINIMAL, overrides)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_job_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"run: \xff")
    with pytest.raises(ConfigError, match=r"job\.yaml is not UTF-8 text \(byte 5\)$"):
        JobConfig.from_yaml(tmp_path / "job.yaml")


def test_sections_built_in_python_speak_alike() -> None:
    with pytest.raises(ConfigError, match=r"^num_worker \(value 4\) is not a known key; did you mean num_workers\?$"):
        ScalingConfig(num_worker=4)  # type: ignore[call-arg]


@given(
    st.builds(Layout, *[st.integers(1, 4)] * 4),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 12), st.integers(1, 40)),
)
def test_layouts_are_taken_exactly_when_they_divide(layout: Layout, sizes: tuple[int, ...]) -> None:
    kv_heads, repeat, num_layers, ffn, rows = sizes
    heads = kv_heads * repeat
    model = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "dim": 8 * heads,
        "num_layers": num_layers,
        "ffn_dim": 8 * ffn,
    }
    data = {**MINIMAL, "model": model, "training": {"max_steps": 1, "global_batch_rows": rows}}
    job = JobConfig.from_dict(data)
    divides = all(size % layout.tp == 0 for size in (heads, kv_heads, 8 * ffn, job.data.vocab_size))
    possible = divides and layout.pp <= num_layers and layout.r * layout.dp <= rows
    assert (layout_problem(layout, job.model, job.data.vocab_size, rows) is None) == possible
    if possible and layout.size <= 8:
        assert candidate_layouts(job.with_overrides([f"layout=['{layout}', '1']"])) == (layout, Layout())


def test_ray_trains_dataclasses_are_taken_as_they_are() -> None:
    import ray.train as ray_train

    job = JobConfig(
        run=ray_train.RunConfig(name="x", checkpoint_config=ray_train.CheckpointConfig(num_to_keep=3)),
        scaling=ray_train.ScalingConfig(num_workers=(1, 4), label_selector={"zone": "a"}),
        training={"max_steps": 3},  # type: ignore[arg-type]
    )
    assert (job.run.name, job.run.checkpoint_config.num_to_keep, job.run.failure_config.max_failures) == ("x", 3, -1)
    assert job.scaling is not None and job.scaling.num_workers == (1, 4) and job.scaling.label_selector == {"zone": "a"}
    with pytest.raises(ConfigError, match=r"^scaling.placement_strategy is 'SPREAD' in ray.train.ScalingConfig; "):
        JobConfig(scaling=ray_train.ScalingConfig(placement_strategy="SPREAD"), training={"max_steps": 3})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^run.failure_config.preemption_grace_s is 9"):
        failing = ray_train.FailureConfig(preemption_grace_s=9.0)
        JobConfig(scaling={}, run=ray_train.RunConfig(failure_config=failing), training={"max_steps": 3})  # type: ignore[arg-type]


def test_the_examples_are_valid_jobs() -> None:
    paths = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
    assert paths
    for path in paths:
        assert JobConfig.from_yaml(path, ["run.name=other"]).run.name == "other"
