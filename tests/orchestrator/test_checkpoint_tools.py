"""``planaria checkpoint diff`` and ``reshard`` on real folders: across layouts, with every kind of difference."""

from __future__ import annotations

import json
import os
import resource
import tracemalloc
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpointing import durable
from checkpointing.difference import differences
from checkpointing.layout import Layout
from checkpointing.publish import begin
from checkpointing.rewrite import rewrite
from checkpointing.schema import Schema, TensorSpec, pieces
from checkpointing.shares import plan_shares
from checkpointing.transfer import Destination, plan_transfer
from orchestrator.cli import main
from orchestrator.config import JobConfig
from orchestrator.runfolder import RunFolder
from tests.checkpointing.node_keepers import TINY, Nodes, cut, random_reference

LAYOUTS = st.builds(Layout, pp=st.integers(1, 3), r=st.integers(1, 2), dp=st.integers(1, 3), tp=st.integers(1, 3))


def save(directory: Path, layout: Layout, reference: Any, schema: Any = TINY, step: int = 7) -> str:
    nodes = Nodes("ab")
    nodes.protect(schema, reference, layout, ["ab"[rank % 2] for rank in range(layout.size)], step=step)
    holdings = nodes.inventory("ab")
    attempt = begin(str(directory), step)
    files = [
        entry
        for node, shares in plan_shares(schema, holdings).items()
        for entry in nodes.keepers[node].write_durable(step, 1, attempt.url, shares)
    ]
    nodes.close()
    return durable.commit(attempt, schema, holdings[0].snapshot, files)


def changed(name: str, index: Any, by: float) -> dict[str, np.ndarray]:
    reference = {n: np.ones(array.shape, array.dtype) for n, array in random_reference(TINY, 1).items()}
    reference[name][index] += np.asarray(by, reference[name].dtype)
    return reference


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(before=LAYOUTS, after=LAYOUTS, file_nbytes=st.sampled_from([1, 300, 1 << 20]))
def test_a_checkpoint_is_rewritten_bitwise_and_cut_for_its_layout(
    tmp_path_factory: pytest.TempPathFactory, before: Layout, after: Layout, file_nbytes: int
) -> None:
    reference = random_reference(TINY, 2)
    source = save(tmp_path_factory.mktemp("src"), before, reference)
    made = rewrite(source, str(tmp_path_factory.mktemp("dst")), after, file_nbytes)
    assert durable.verify(made, deep=True) == () and list(differences(source, made, None)) == []
    manifest = durable.read_manifest(made)
    assert manifest["layout"] == str(after) and manifest["meta"] == durable.read_manifest(source)["meta"]
    written = [record.piece for holding in durable.checkpoint_holdings(made) for record in holding.snapshot.records]
    assert sorted(written) == sorted({p for rank in range(after.size) for p in pieces(TINY, after, rank)})
    whole = pieces(TINY, Layout(), 0)
    plan = plan_transfer(TINY, durable.checkpoint_holdings(made), {0: Destination("n", whole)})
    Nodes("n").load(plan, 0, Destination("n", whole), reference)
    assert cut(reference, whole[0]).size


def test_equal_states_under_any_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = random_reference(TINY, 3)
    a = save(tmp_path / "a", Layout.parse("dp2·tp2·pp2"), reference)
    b = save(tmp_path / "b", Layout.parse("pp3·tp3"), reference)
    assert main(["checkpoint", "diff", a, b]) == 0
    assert capsys.readouterr().out == f"{len(TINY.tensors)} tensors are equal bit by bit\n"
    assert main(["checkpoint", "diff", a, b, "--allclose", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differing"] == []


@pytest.mark.parametrize(
    ("name", "index", "shown"),
    [
        ("embed.weight", (8, 5), "embed.weight: 1 of 78 elements differ, by at most 0.01, first at [8, 5]"),
        ("exp_avg/layers.2.wq.weight", (6, 0), "1 of 35 elements differ, by at most"),
        ("step", (), "step: 1 of 1 elements differ, by at most 1, first at []"),
    ],
)
def test_what_differs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, index: Any, shown: str
) -> None:
    by = {"embed.weight": 0.01, "step": 1}.get(name, 256)
    a = save(tmp_path / "a", Layout.parse("dp3"), changed(name, index, by))
    b = save(tmp_path / "b", Layout.parse("tp2·pp2"), changed(name, index, 0))
    assert main(["checkpoint", "diff", a, b]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(name) and shown in first and last == "1 tensors differ"
    if name == "embed.weight":
        assert main(["checkpoint", "diff", a, b, "--allclose", "0.011"]) == 0
        assert main(["checkpoint", "diff", a, b, "--allclose", "0.009"]) == 1


def test_nan_and_signed_zero_are_compared_by_bits_unless_values_are_asked_for(tmp_path: Path) -> None:
    ours, theirs = changed("embed.weight", (0, 0), 0), changed("embed.weight", (0, 0), 0)
    ours["embed.weight"][0, :2] = (np.nan, 0.0)
    theirs["embed.weight"][0, :2] = (-np.nan, -0.0)
    a, b = save(tmp_path / "a", Layout(), ours), save(tmp_path / "b", Layout(dp=2), theirs)
    (found,) = differences(a, b, None)
    assert (found.num_differing, found.largest, found.num_not_finite, found.first) == (2, 0.0, 1, (0, 0))
    assert list(differences(a, b, 0.0)) == []


def one_tensor(folder: Path, array: np.ndarray) -> str:
    schema = Schema((TensorSpec("w", array.shape, array.dtype.name, None, "all", fsdp_dims=()),), 1)
    return save(folder, Layout(), {"w": array}, schema)


INTEGERS = [-(2**63), -(2**53) - 1, -1, 0, 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    dtype=st.sampled_from(["int64", "uint64", "int8"]),
    pairs=st.lists(st.tuples(st.sampled_from(INTEGERS), st.sampled_from([-1, 0, 1, None])), min_size=1, max_size=6),
    rtol=st.sampled_from([0.0, 1e-20, 1e-3, 0.5, 2.0]),
)
def test_integers_are_compared_exactly(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, pairs: list[tuple[int, int | None]], rtol: float
) -> None:
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    ours = [min(max(x, least), most) for x, _ in pairs]
    theirs = [min(max(-x if by is None else x + by, least), most) for x, (_, by) in zip(ours, pairs, strict=True)]
    apart = [abs(x - y) for x, y in zip(ours, theirs, strict=True)]
    for given_rtol in (None, rtol):
        differing = [d for d, y in zip(apart, theirs, strict=True) if d > Fraction(given_rtol or 0) * abs(y)]
        folder = tmp_path_factory.mktemp("ints")
        a, b = (one_tensor(folder / n, np.array(x, dtype)) for n, x in (("a", ours), ("b", theirs)))
        found = list(differences(a, b, given_rtol))
        assert [(f.num_differing, f.largest) for f in found] == [(len(differing), max(differing, default=0))] * bool(
            differing
        )


def test_neighbours_beyond_float64_differ_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (one_tensor(tmp_path / str(i), np.array([2**53 + i], np.int64)) for i in (0, 1))
    assert main(["checkpoint", "diff", a, b, "--allclose", "0"]) == 1
    assert "1 of 1 elements differ, by at most 1, first at [0]" in capsys.readouterr().out
    assert main(["checkpoint", "diff", a, b, "--allclose", "1e-15"]) == 0


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("rtol", [[], ["--allclose", "0.1"]])
@pytest.mark.parametrize(
    ("ours", "theirs", "largest", "num_not_finite"),
    [
        ([1.0], [NAN], None, 1),
        ([1.0, 1.0], [INF, 2.0], 1.0, 1),
        ([INF], [-INF], None, 1),
        ([1e308], [-1e308], None, 0),
        ([1.0, NAN, INF], [3.0, NAN, INF], 2.0, 0),
    ],
)
def test_what_is_not_finite_is_said_and_is_json(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ours: list[float],
    theirs: list[float],
    largest: float | None,
    num_not_finite: int,
    rtol: list[str],
) -> None:
    a, b = one_tensor(tmp_path / "a", np.array(ours)), one_tensor(tmp_path / "b", np.array(theirs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["checkpoint", "diff", a, b, "--json", *rtol]) == 1
    (found,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["differing"]
    assert (found["largest"], found["num_not_finite"]) == (largest, num_not_finite)
    assert main(["checkpoint", "diff", a, b, *rtol]) == 1
    said = capsys.readouterr().out
    assert ("by at most" in said) == (largest is not None)
    assert ("1 of them NaN or infinite on a side" in said) == (num_not_finite == 1)


@pytest.mark.parametrize("rtol", ["nan", "inf", "-1"])
def test_a_tolerance_is_a_finite_number(tmp_path: Path, rtol: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "diff", "a", "b", "--allclose", rtol]) == 2
    assert "--allclose" in capsys.readouterr().err


def test_many_files_are_compared_with_few_open(tmp_path: Path) -> None:
    wide = Schema((TensorSpec("w", (600,), "float32", None, "all"),), 1)
    source = save(tmp_path / "a", Layout(), random_reference(wide, 1), wide)
    made = rewrite(source, str(tmp_path / "b"), Layout(dp=300), file_nbytes=1)
    assert len(list(Path(made).rglob("*.safetensors"))) == 300
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 150, before[1]))
    try:
        assert list(differences(made, made, None)) == []
        assert durable.verify(rewrite(made, str(tmp_path / "c"), Layout(dp=2)), deep=True) == ()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_other_shapes_and_missing_tensors_are_differences(tmp_path: Path) -> None:
    fewer = type(TINY)(TINY.tensors[1:], TINY.num_layers)
    a = save(tmp_path / "a", Layout(), random_reference(TINY, 1))
    b = save(tmp_path / "b", Layout(), random_reference(fewer, 1), fewer)
    notes = {found.name: found.note for found in differences(a, b, None)}
    assert notes.pop("embed.weight") == f"only in {a}"


def test_runs_are_named_with_their_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = JobConfig.from_dict({"scaling": {"num_workers": 2}, "training": {"max_steps": 5}})
    folder = RunFolder(str(tmp_path), "run")
    folder.acquire(job)
    run, checkpoints = str(tmp_path / "run"), tmp_path / "run" / "checkpoints"
    save(checkpoints, Layout(dp=2), random_reference(TINY, 1), step=4)
    save(checkpoints, Layout(), random_reference(TINY, 2), step=9)
    assert main(["checkpoint", "diff", f"{run}@4", f"{run}@4"]) == 0
    assert main(["checkpoint", "diff", run, f"{run}@4"]) == 1
    assert main(["checkpoint", "diff", run, f"{run}@5"]) == 2
    assert "no checkpoint of step 5" in capsys.readouterr().err
    other = tmp_path / "other"
    assert main(["checkpoint", "reshard", f"{run}@4", str(other), "--layout", "pp2.tp2"]) == 0
    assert main(["checkpoint", "diff", str(other / "step-00000004"), f"{run}@4"]) == 0
    assert main(["checkpoint", "reshard", f"{run}@4", str(checkpoints), "--layout", "pp2.tp2"]) == 2
    assert "only its driver writes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("pp5", "layout pp5 has more stages than the checkpoint has layers (4)"),
        ("pp2:1+1", "layout pp2:1+1 deals out 2 layers, but the checkpoint has 4"),
        ("qq2", "unknown axis 'qq'"),
    ],
)
def test_layouts_that_the_model_cannot_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, sentence: str
) -> None:
    source = save(tmp_path / "a", Layout(), random_reference(TINY, 1))
    assert main(["checkpoint", "reshard", source, str(tmp_path / "b"), "--layout", layout]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.glob("b/*"))


def test_a_damaged_source_is_named_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(tmp_path / "a", Layout(tp=2), random_reference(TINY, 1))
    file = next(Path(source).glob("data/*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["checkpoint", "reshard", source, str(tmp_path / "b"), "--layout", "dp2"]) == 2
    assert f"is damaged in the file {file}" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    assert main(["checkpoint", "diff", source, source]) == 2
    assert main(["checkpoint", "diff", str(tmp_path), source]) == 2


def test_memory_is_bounded_by_a_file_and_not_by_the_state(tmp_path: Path) -> None:
    wide = Schema(tuple(TensorSpec(f"w{i}", (256, 1024), "float32", 1, "all") for i in range(24)), 1)  # 24 MiB
    source = save(tmp_path / "a", Layout(dp=2), random_reference(wide, 1), wide)
    peaks = {}
    for name, work in {
        "rewrite": lambda: rewrite(source, str(tmp_path / "b"), Layout(tp=2), file_nbytes=1 << 20),
        "compare": lambda: list(differences(source, source, 1e-6)),
    }.items():
        tracemalloc.start()
        try:
            work()
            peaks[name] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peaks["rewrite"] < 5 << 20
    assert peaks["compare"] < 16 << 20, "one block of a million elements, by value"


def test_an_existing_step_is_not_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save(tmp_path / "a", Layout(tp=2), random_reference(TINY, 1))
    for code in (0, 2):
        assert main(["checkpoint", "reshard", source, str(tmp_path / "b"), "--layout", "dp2", "--json"]) == code
    assert "has a checkpoint of step 7 already" in capsys.readouterr().err
