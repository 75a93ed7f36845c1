"""Which checkpoints stay: rules by themselves and together, never without a verified one, never one being read."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing import durable, retention
from checkpointing.config import CheckpointConfig, KeepRule, parse_size
from checkpointing.layout import Layout
from checkpointing.pace import Pacer
from checkpointing.publish import list_checkpoints, step_of
from checkpointing.retention import kept, reading, retain, superfluous
from checkpointing.storage import open_storage
from tests.checkpointing.node_keepers import save_checkpoint


@pytest.fixture(params=["local", "s3"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return request.getfixturevalue("object_server").url(f"kept-{secrets.token_hex(4)}")
    return str(tmp_path)


def save(directory: str, step: int) -> str:
    return save_checkpoint(directory, step, Layout(), "a")


def no_metrics() -> dict[int, dict[str, Any]]:
    raise AssertionError("no rule asks for a metric")


rules = st.one_of(
    st.builds(KeepRule, latest=st.integers(1, 5)),
    st.builds(KeepRule, every_steps=st.integers(1, 5)),
    st.builds(KeepRule, best=st.integers(1, 5), mode=st.sampled_from(["min", "max"])),
)


@given(
    steps=st.sets(st.integers(1, 30)),
    latest=st.integers(1, 5),
    keep=st.lists(rules, max_size=3),
    loss=st.dictionaries(st.integers(1, 30), st.floats(0, 9)),
)
def test_a_step_stays_when_any_rule_keeps_it(
    steps: set[int], latest: int, keep: list[KeepRule], loss: dict[int, float]
) -> None:
    config = CheckpointConfig(num_to_keep=latest, keep=tuple(keep))
    found = kept(sorted(steps), config, lambda: {step: {"loss": value} for step, value in loss.items()})
    for step in steps:
        reasons = [sum(other > step for other in steps) < latest]
        for rule in keep:
            if rule.latest is not None:
                reasons.append(sum(other > step for other in steps) < rule.latest)
            elif rule.every_steps is not None:
                reasons.append(step % rule.every_steps == 0)
            elif step in loss:  # of equal ones the later is the better
                sign = 1 if rule.mode == "min" else -1
                rivals = {(sign * loss[other], -other) for other in steps & loss.keys()}
                reasons.append(sum(rival < (sign * loss[step], -step) for rival in rivals) < (rule.best or 0))
        assert (step in found) == any(reasons), (step, reasons)


def test_null_keeps_all() -> None:
    assert kept([1, 2, 3], CheckpointConfig(num_to_keep=None), no_metrics) == {1, 2, 3}


@pytest.mark.parametrize("fields", [{}, {"latest": 1, "best": 2}, {"metric": "loss"}])
def test_a_rule_is_one_thing(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="exactly one of latest, every_steps and best"):
        KeepRule(**fields)


def test_the_newest_the_damaged_and_always_a_verified_one_stay(directory: str) -> None:
    made = [save(directory, step) for step in range(1, 6)]
    keep_two, keep_one = CheckpointConfig(num_to_keep=2), CheckpointConfig(num_to_keep=1)
    open_storage(made[3]).remove("manifest.json")
    assert superfluous(directory, keep_two, no_metrics) == made[:2] and list_checkpoints(directory) == made
    assert retain(directory, keep_two, no_metrics) == made[:2]
    assert list_checkpoints(directory) == made[2:]
    file = durable.read_manifest(made[4])["files"][0]["file"]
    whole = open_storage(made[4]).read(file) or b""
    open_storage(made[4]).write(file, whole[:-1] + bytes([whole[-1] ^ 1]))
    assert retain(directory, keep_one, no_metrics) == [], "the newest is damaged, so the one before must stay"
    assert durable.newest_verified(directory)[0] == made[2]
    assert list_checkpoints(directory) == made[2:]


def test_rules_of_a_run(directory: str) -> None:
    config = CheckpointConfig(num_to_keep=1, keep=(KeepRule(every_steps=4), KeepRule(best=1)))
    for step in range(1, 8):
        save(directory, step)
        retain(directory, config, lambda: {step: {"loss": abs(step - 3.2)} for step in range(1, 8)})
    assert list(map(step_of, list_checkpoints(directory))) == [3, 4, 7]


def test_what_is_being_read_stays_until_the_reader_is_through_or_gone(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (save(directory, step) for step in (1, 2, 3))
    keep_one = CheckpointConfig(num_to_keep=1)
    with reading(first), reading(first):
        assert retain(directory, keep_one, no_metrics) == [second]
    with reading(first):
        monkeypatch.setattr(retention.time, "time", lambda now=retention.time.time: now() + 61)
        assert retain(directory, keep_one, no_metrics) == [first], "its mark was not renewed: the reader is dead"
        assert list_checkpoints(directory) == [third]
    assert not [name for name in open_storage(directory).sizes("") if not name.startswith("step-")]


def test_a_reader_that_came_by_a_link_is_seen_and_leaves_no_folder(tmp_path: Path) -> None:
    directory, keep_one = str(tmp_path / "run"), CheckpointConfig(num_to_keep=1)
    first, _ = save(directory, 1), save(directory, 2)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(first)
    (tmp_path / "lnk").symlink_to(directory)
    for place in (tmp_path / "elsewhere" / "link", tmp_path / "lnk" / Path(first).name):
        with reading(str(place)), reading(first):
            assert retain(directory, keep_one, no_metrics) == []
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["link"]
    assert sorted(path.name for path in Path(directory).iterdir()) == ["step-00000001", "step-00000002"]
    assert retain(directory, keep_one, no_metrics) == [first]


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1 B", 1), ("200 MiB", 200 << 20), ("1.5GiB", 3 << 29), ("2 KiB", 2048), ("1 TiB", 1 << 40)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes == parse_size(CheckpointConfig(max_bandwidth=text).max_bandwidth or "")


@pytest.mark.parametrize("text", ["", "200", "200 MB", "-1 B", "0 B", "1 PiB", "many"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write a number and B, KiB, MiB, GiB or TiB, as in '200 MiB'"):
        CheckpointConfig(max_bandwidth=text)


def test_a_writer_keeps_below_its_bandwidth() -> None:
    """On a clock that only moves by waiting."""
    now, written = [100.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    pace: Callable[[int], None] = Pacer(1000.0, clock=lambda: now[0], sleep=sleep)
    for nbytes in (500, 2000, 1, 0, 700, 300):
        pace(nbytes)
        written.append((now[0], nbytes))
    assert [time for time, _ in written] == pytest.approx([100.0, 100.5, 102.5, 102.501, 102.501, 103.201])
    now[0] += 60
    pace(1000)
    pace(1000)
    assert now[0] == pytest.approx(164.201), "idle time is not saved up"
