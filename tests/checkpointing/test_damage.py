"""A flipped, cut off, missing or exchanged byte anywhere in a checkpoint is found, and the file is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from checkpointing import durable
from checkpointing.holding import DigestMismatch
from checkpointing.layout import Layout
from checkpointing.storage import open_storage
from tests.checkpointing.node_keepers import save_checkpoint
from tests.checkpointing.test_durable import SAVED_UNDER, load
from tests.object_server import ObjectServer


def damaged(whole: bytes, kind: str, rng: np.random.Generator) -> bytes:
    """``whole`` with one byte flipped, without its end, or with two unequal bytes in each other's place."""
    at = int(rng.integers(len(whole)))
    torn = bytearray(whole)
    if kind == "cut":
        return whole[:at]
    if kind == "flip":
        torn[at] ^= 1 << int(rng.integers(8))
    else:
        other = int(rng.choice([index for index in range(len(whole)) if whole[index] != whole[at]]))
        torn[at], torn[other] = torn[other], torn[at]
    return bytes(torn)


def check_every_file(checkpoint: str, num_tries: int) -> None:
    storage, rng = open_storage(checkpoint), np.random.default_rng(7)
    for name in sorted(storage.sizes("")):
        whole = storage.read(name) or b""
        for kind in ("flip", "cut", "exchange"):
            for _ in range(num_tries):
                storage.write(name, damaged(whole, kind, rng))
                problems = durable.verify(checkpoint, deep=True)
                assert problems and all(f"checkpoint {checkpoint}: " in problem for problem in problems), (name, kind)
                assert any(name in problem for problem in problems), (name, kind, problems)
        storage.remove(name)
        (problem,) = durable.verify(checkpoint, deep=True)
        assert f"{name} is missing" in problem
        storage.write(name, whole)
    assert durable.verify(checkpoint, deep=True) == ()


def test_every_file_of_a_local_checkpoint(tmp_path: Path, prove: bool) -> None:
    check_every_file(save_checkpoint(str(tmp_path), 3, SAVED_UNDER), 100 if prove else 6)


def test_every_file_of_a_checkpoint_on_s3(object_server: ObjectServer, prove: bool) -> None:
    check_every_file(save_checkpoint(object_server.url("damage"), 3, Layout.parse("dp2"), "ab"), 20 if prove else 2)


def test_exchanged_files_are_found(tmp_path: Path) -> None:
    """Two files in each other's place have good bytes, but not where the manifest says."""
    checkpoint = save_checkpoint(str(tmp_path), 3, SAVED_UNDER)
    storage = open_storage(checkpoint)
    first, second = sorted(name for name in storage.sizes("") if name.startswith("data/0"))[:2]
    contents = storage.read(first), storage.read(second)
    storage.write(first, contents[1] or b"")
    storage.write(second, contents[0] or b"")
    problems = "\n".join(durable.verify(checkpoint, deep=True))
    assert first in problems and second in problems


def test_a_damaged_piece_is_named_and_not_loaded(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(str(tmp_path), 3, SAVED_UNDER)
    for holding in durable.checkpoint_holdings(checkpoint):
        for record in holding.snapshot.records:
            path = Path(str(holding.locator))
            whole = path.read_bytes()
            torn = bytearray(whole)
            torn[record.start + record.nbytes - 1] ^= 1
            path.write_bytes(torn)
            assert any(f"{record.piece.name}[" in problem for problem in durable.verify(checkpoint, deep=True))
            with pytest.raises(DigestMismatch, match=record.piece.name.replace(".", r"\.")) as error:
                load(checkpoint, Layout(), 3)
            assert error.value.key == holding.key
            path.write_bytes(whole)
    load(checkpoint, Layout(), 3)
