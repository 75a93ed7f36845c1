"""Others read our files as they are: safetensors itself, and torch's own reader, which joins the boxes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as torch_load

from checkpointing import durable
from checkpointing.layout import Layout
from tests.checkpointing.node_keepers import TINY, random_reference, save_checkpoint

# With few nodes, one keeper writes several boxes of a tensor, each into another file.
CASES = [("dp2·tp2·pp2", "abcd"), ("dp3·tp2", "ab"), ("dp2·tp3", "a"), ("1", "a"), ("r2·dp2", "ab")]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]} on {len(case[1])}")
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    layout, names = request.param
    return Path(save_checkpoint(str(tmp_path), 3, Layout.parse(layout), names))


def test_safetensors_finds_each_box_under_its_tensors_name(checkpoint: Path) -> None:
    reference = random_reference(TINY, 3)
    boxes = 0
    for entry in durable.read_manifest(str(checkpoint))["files"]:
        if not entry["file"].startswith("data/optimizer/"):  # numpy has no bfloat16
            tensors = load_file(checkpoint / entry["file"])
            assert len(tensors) == len(entry["pieces"])
            for piece in entry["pieces"]:
                where = tuple(slice(o, o + n) for o, n in zip(piece["offset"], piece["size"], strict=True))
                assert tensors[piece["name"]].tobytes() == reference[piece["name"]][where].tobytes()
                assert (piece["start"] - entry["header_nbytes"]) % reference[piece["name"]].itemsize == 0
                boxes += 1
    assert boxes


@pytest.mark.parametrize("folder", ["data", "data/optimizer"])
def test_torchs_reader_sees_the_model_alone_and_the_optimizer_alone(checkpoint: Path, folder: str) -> None:
    reader = HuggingFaceStorageReader(str(checkpoint / folder))
    expected = {spec.name: spec for spec in TINY.tensors if ("/" in spec.name) == folder.endswith("optimizer")}
    assert reader.read_metadata().state_dict_metadata.keys() == expected.keys()
    state = {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in expected.items()}
    torch_load(state, storage_reader=HuggingFaceStorageReader(str(checkpoint / folder)), no_dist=True)
    for name, array in random_reference(TINY, 3).items():
        if name in expected:
            assert (
                state[name].view(torch.uint8 if array.ndim else state[name].dtype).numpy().tobytes() == array.tobytes()
            )
