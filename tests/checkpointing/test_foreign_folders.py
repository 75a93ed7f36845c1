"""Damaged or malformed folders of others end in a sentence that names file or tensor; values stay what they are."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing.dcp import DcpFolder
from checkpointing.safetensors_folder import INDEX, SINGLE, SafetensorsFolder, convert


def safetensors_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Mostly right: one number may be off, or of another kind."""
    header, place = {}, 0
    for name in draw(st.permutations("abc"))[: draw(st.integers(0, 3))]:
        dtype, itemsize = draw(st.sampled_from([("F32", 4), ("BF16", 2), ("U8", 1), ("I64", 8)]))
        shape = draw(st.lists(st.integers(0, 3), max_size=2))
        nbytes = itemsize * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + nbytes]}
        place += nbytes
    if header and draw(st.booleans()):
        where = header[draw(st.sampled_from(sorted(header)))][draw(st.sampled_from(["shape", "data_offsets"]))]
        if where:
            at = draw(st.integers(0, len(where) - 1))
            changed = [where[at] + 1, where[at] - 1, -1, 0, float(where[at]), 10**30, 10**12, True, None, "1"]
            where[at] = draw(st.sampled_from(changed))
    data = bytes(range(place)) + b"x" * draw(st.sampled_from([0, 0, 0, 1]))
    return safetensors_file(header, data[: len(data) - draw(st.sampled_from([0, 0, 0, 1]))])


@settings(max_examples=400, deadline=None)
@given(content=files())
def test_a_header_is_taken_if_and_only_if_safetensors_takes_it(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "one"
    folder.mkdir(exist_ok=True)
    (folder / SINGLE).write_bytes(content)
    try:
        theirs = dict(safetensors.deserialize(content))
    except safetensors.SafetensorError:
        with pytest.raises(ValueError, match=f"^{SINGLE} in .* is not a safetensors file: "):
            SafetensorsFolder(str(folder))
    else:
        ours = SafetensorsFolder(str(folder))
        assert {name: ours.read(name).tobytes() for name in ours.tensors} == {
            name: bytes(found["data"]) for name, found in theirs.items()
        }


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "its header is too long"),
        (safetensors_file(b"{}", length=1 << 40), "its header is too long"),
        (safetensors_file(b"[" * 100_000), "its JSON is nested too deeply"),
        (safetensors_file([1]), "its JSON is not an object"),
        (safetensors_file({"a": [1]}), "what it says of a is not"),
        (safetensors_file(entry("F4"), bytes(8)), "what it says of a is not"),
        (safetensors_file(entry(["F32"]), bytes(8)), "what it says of a is not"),
        (safetensors_file(entry(shape=(3,)), bytes(8)), r"a has 8 bytes, which float32 \[3\] has not"),
        (safetensors_file(entry() | {"b": entry()["a"]}, bytes(16)), "b does not begin where the tensor before"),
        (safetensors_file(entry(), bytes(7)), "bytes instead of"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{SINGLE} in {tmp_path} is not a safetensors file: .*{sentence}"):
        SafetensorsFolder(str(tmp_path))


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        (b"[", f"{INDEX} in .* is not an index: "),
        (b"[]", f"{INDEX} in .* is not an index: its JSON is not an object"),
        (b"{}", f"{INDEX} in .* is not an index: its weight_map does not give each tensor a file"),
        (b'{"weight_map": null}', "its weight_map does not"),
        (b'{"weight_map": ["f"]}', "its weight_map does not"),
        (b'{"weight_map": {"a": 1}}', "its weight_map does not"),
        (b'{"weight_map": {"a": "../f"}}', "names '../f', which is not in the same folder"),
        (b'{"weight_map": {"a": "gone"}}', "has no gone"),
        (b'{"weight_map": {"b": "f"}}', "f in .* does not hold b, though"),
        (b'{"weight_map": {"a": "f", "b": "g"}}', "g in .* holds a, which is another file's"),
        (b"[" * 100_000, "is not an index: its JSON is nested too deeply"),
    ],
)
def test_a_broken_index_is_named_with_what_is_wrong(tmp_path: Path, index: bytes, sentence: str) -> None:
    for name in "fg":
        (tmp_path / name).write_bytes(safetensors_file(entry(), bytes(8)))
    (tmp_path / INDEX).write_bytes(index)
    with pytest.raises(ValueError, match=sentence):
        SafetensorsFolder(str(tmp_path))


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_finite_value_stays_finite_or_is_refused(shape: tuple[int, ...], recwarn: pytest.WarningsRecorder) -> None:
    for value, dtype, wanted in [(1e300, "float64", "float32"), (-1e30, "float32", "float16")]:
        with pytest.raises(
            ValueError, match=rf"w holds {re.escape(str(float(np.dtype(dtype).type(value))))}, which is"
        ):
            convert(np.full(shape, value, dtype), dtype, wanted, "w")
    with pytest.raises(ValueError, match="w holds .* too large for float16"):
        convert(np.full(shape, 0x7F7F, np.uint16), "bfloat16", "float16", "w")  # bfloat16's largest
    for value in (np.inf, -np.inf, np.nan, 3.4028235e38, 1e-300):
        array = np.full(shape, value, np.float64)
        assert convert(array, "float64", "float32", "w").tobytes() == array.astype(np.float32).tobytes()
    bits = torch.full(shape, 1.5, dtype=torch.bfloat16).view(torch.uint16).numpy()
    assert convert(bits, "bfloat16", "float32", "w").tobytes() == np.full(shape, 1.5, np.float32).tobytes()
    assert not recwarn.list


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "saved"
    state = {f"model.{name}": torch.arange(12.0).reshape(3, 4) + i for i, name in enumerate("abc")}
    dcp.save({**state, "optim": {"param_groups": [{"lr": 1.0}]}}, checkpoint_id=folder, no_dist=True)
    return folder


def read_all(folder: Path) -> dict[str, bytes]:
    source = DcpFolder(folder)
    return {name: source.read(name).tobytes() for name in source.tensors}


def test_any_damage_to_a_dcp_checkpoint_is_a_sentence_or_changes_no_value(saved: Path, tmp_path: Path) -> None:
    folder, whole, rng = Path(shutil.copytree(saved, tmp_path / "copy")), read_all(saved), np.random.default_rng(0)
    num_refused = {}
    for file in (".metadata", "__0_0.distcp"):
        content = (saved / file).read_bytes()
        damaged = [bytearray(content) for _ in range(80)]
        for copy in damaged:
            copy[rng.integers(len(content))] ^= 1 << rng.integers(8)
        num_refused[file] = 0
        for copy in (*damaged, *(content[:length] for length in rng.integers(len(content) - 1, size=10))):
            (folder / file).write_bytes(copy)
            try:
                found = read_all(folder)
            except ValueError as error:
                num_refused[file] += 1
                assert "\n" not in str(error) and "Traceback" not in str(error)
            else:  # a name may be another one, or a tensor no longer one: what is found under its name is right
                assert all(whole[name] == data for name, data in found.items() if name in whole)
        (folder / file).write_bytes(content)
    assert min(num_refused.values()) > 15


def test_what_is_wrong_with_a_dcp_checkpoint_is_said_before_it_is_read(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    content = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"__0_0.distcp is cut off: model\.\w\[0:3, 0:4\] is not whole"):
        DcpFolder(folder)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"has no '__0_0.distcp', which is to hold model\.\w\[0:3, 0:4\]"):
        DcpFolder(folder)
    (folder / ".metadata").write_bytes(b"r\xff\xff\xff\x7f" + (saved / ".metadata").read_bytes())
    with pytest.raises(ValueError, match=r"\.metadata cannot be read .*: it remembers an object as number 2147483647"):
        DcpFolder(folder)


def test_a_part_that_is_nowhere_is_missed(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    metadata = dcp.FileSystemReader(saved).read_metadata()
    metadata.state_dict_metadata["model.a"].size = torch.Size((4, 4))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"has no model\.a\[3:4, 0:4\]"):
        DcpFolder(folder)


def test_a_flipped_byte_of_a_tensor_is_found(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    content = bytearray((folder / "__0_0.distcp").read_bytes())
    content[content.index((np.arange(12, dtype=np.float32) + 1).tobytes()) + 7] ^= 1
    (folder / "__0_0.distcp").write_bytes(content)
    source = DcpFolder(folder)
    assert source.read("model.a").tobytes() == np.arange(12, dtype=np.float32).tobytes()
    with pytest.raises(ValueError, match=r"model\.b\[0:3, 0:4\] is damaged in .*__0_0.distcp: a checksum is wrong"):
        source.read("model.b")
