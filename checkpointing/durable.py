"""Durable checkpoints: a folder of safetensors files, a manifest, and a mark that says it is whole.

    step-00001200/
        data/00000-00000.safetensors             parameters; node 0 of the plan, its first box of each tensor
        data/optimizer/00000-00000.safetensors   optimizer state, laid out alike
        manifest.json                            every file and piece: box, byte range, digest
        COMMITTED                                the manifest's digest

A checkpoint is written into a temporary folder beside it and renamed when everything in it is on disk, so a folder
named ``step-…`` is whole or was damaged later. Nothing is written into it again. Files are standard safetensors;
their ``DCP_SHARDING_INFO`` lets torch's own reader join the boxes.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpointing.boxes import volume
from checkpointing.checkpoint_file import Share, damage, record_of, write_file
from checkpointing.cover import StateLost, describe_missing, held_boxes, missing_boxes
from checkpointing.holding import Holding, verify_record
from checkpointing.schema import Piece, Schema, TensorSpec
from checkpointing.snapshot import Record, Snapshot, digest_of

FORMAT = 1
_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_TEMPORARY = ".tmp"


def plan_shares(schema: Schema, holdings: Sequence[Holding]) -> dict[str, tuple[Share, ...]]:
    """Per node what its keeper writes, from memory holdings of one step: every box once, bytes spread evenly.

    Pins come before primaries, and those before copies. Every node with a holding is in the result, perhaps with
    nothing to write, since ``Keeper.write_durable`` also drops the pins. Raises StateLost when a box is missing.
    """
    missing = missing_boxes(schema, held_boxes(holdings))
    if missing:
        raise StateLost(describe_missing(holdings[0].snapshot.step if holdings else None, missing), missing)
    specs = {spec.name: spec for spec in schema.tensors}
    holders: dict[Piece, list[tuple[Holding, Record]]] = defaultdict(list)
    for holding in sorted(holdings, key=lambda holding: holding.key):
        for record in holding.snapshot.records:
            if record.piece.name in specs:
                holders[record.piece].append((holding, record))
    nodes = sorted({holding.node for holding in holdings})
    load = dict.fromkeys(nodes, 0)
    num_boxes: dict[tuple[str, str], int] = defaultdict(int)  # by node and tensor: two boxes of one need two files
    shares: dict[str, list[Share]] = {node: [] for node in nodes}
    preference = ("pin", "primary", "copy")
    for piece in sorted(holders, key=lambda piece: (-volume(piece), piece)):
        best = min(preference.index(holding.role) for holding, _ in holders[piece])
        able = [pair for pair in holders[piece] if pair[0].role == preference[best]]
        holding, record = min(able, key=lambda pair: (load[pair[0].node], pair[0].key))
        node = holding.node
        load[node] += record.nbytes
        folder = "data/optimizer" if "/" in piece.name else "data"
        file = f"{folder}/{nodes.index(node):05d}-{num_boxes[node, piece.name]:05d}.safetensors"
        num_boxes[node, piece.name] += 1
        shares[node].append(Share(holding, record, specs[piece.name].dtype, file))
    return {node: tuple(shares[node]) for node in nodes}


def begin(directory: Path, step: int) -> Path:
    """Make the temporary folder for a checkpoint of ``step`` in ``directory`` (the run's ``checkpoints``).

    Removes what dead attempts left; the caller is the run's only driver and writes one checkpoint at a time.
    """
    clean(directory)
    attempt = directory / f".{_folder_name(step)}.{secrets.token_hex(4)}{_TEMPORARY}"
    (attempt / "data" / "optimizer").mkdir(parents=True)
    return attempt


def clean(directory: Path) -> None:
    """Remove the temporary folders of attempts that never ended."""
    for path in directory.glob(f".step-*{_TEMPORARY}"):
        shutil.rmtree(path, ignore_errors=True)


def write_share(attempt: Path, shares: Sequence[tuple[Share, np.ndarray]]) -> list[dict[str, Any]]:
    """Write the shares' records, each found in its buffer (uint8, 1-d), and fsync. Returns one manifest entry per file.

    Raises DigestMismatch before a damaged record gets into a file.
    """
    by_file: dict[str, list[tuple[Share, np.ndarray]]] = defaultdict(list)
    for share, buffer in shares:
        verify_record(share.record, buffer, str(share.holding), share.holding.key)
        by_file[share.file].append((share, share.record.data(buffer)))
    return [write_file(attempt, file, by_file[file]) for file in sorted(by_file)]


def commit(attempt: Path, schema: Schema, snapshot: Snapshot, files: Iterable[Mapping[str, Any]]) -> Path:
    """Turn a fully written ``attempt`` into a checkpoint and return its folder. ``snapshot``: any rank's of the step.

    Raises StateLost when the files do not cover the schema. When an intact checkpoint of the step is there already, it
    stays and the attempt is dropped; a damaged one is moved aside.
    """
    manifest = {
        "format": FORMAT,
        "step": snapshot.step,
        "generation": snapshot.generation,
        "layout": snapshot.layout,
        "meta": snapshot.meta,
        "tensors": {spec.name: {"shape": spec.shape, "dtype": spec.dtype} for spec in schema.tensors},
        "files": sorted(files, key=lambda entry: entry["file"]),
    }
    missing = _missing(manifest)
    if missing:
        raise StateLost(describe_missing(snapshot.step, missing), missing)
    text = json.dumps(manifest, indent=1).encode()
    _write_synced(attempt / "manifest.json", text)
    _write_synced(attempt / "COMMITTED", _mark(text))
    for folder in (attempt / "data" / "optimizer", attempt / "data", attempt):
        _sync_folder(folder)
    target = attempt.parent / _folder_name(snapshot.step)
    if target.exists():
        if not verify(target, deep=True):
            shutil.rmtree(attempt)
            return target
        os.rename(target, target.with_name(f"{target.name}.damaged-{secrets.token_hex(4)}"))
    os.rename(attempt, target)
    _sync_folder(attempt.parent)
    return target


def list_checkpoints(directory: Path) -> list[Path]:
    """Folders of committed checkpoints, oldest step first, damaged ones included."""
    found = [path for path in directory.glob("step-*") if _STEP_FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    match = _STEP_FOLDER.fullmatch(checkpoint.name)
    assert match is not None, f"{checkpoint} is not a checkpoint's folder"
    return int(match[1])


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest, checked against COMMITTED. Raises ValueError naming what is wrong with it."""
    try:
        text = (checkpoint / "manifest.json").read_bytes()
        mark = (checkpoint / "COMMITTED").read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"checkpoint {checkpoint}: {Path(error.filename).name} is missing") from None
    if mark != _mark(text):
        raise ValueError(f"checkpoint {checkpoint}: COMMITTED does not have the digest of manifest.json")
    manifest = json.loads(text)
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"checkpoint {checkpoint}: format {manifest['format']} is not known; this version reads {FORMAT}"
        )
    return manifest


def verify(checkpoint: Path, deep: bool) -> tuple[str, ...]:
    """What is wrong with a checkpoint, one sentence each; empty when it is whole.

    Shallow: manifest, presence and size of the files, cover of every tensor. ``deep`` reads and digests every byte.
    """
    try:
        manifest = read_manifest(checkpoint)
    except ValueError as error:
        return (str(error),)
    problems = [f"checkpoint {checkpoint}: {describe_missing(manifest['step'], m)}" for m in [_missing(manifest)] if m]
    for entry in manifest["files"]:
        path = checkpoint / entry["file"]
        size = path.stat().st_size if path.is_file() else None
        if size != entry["nbytes"]:
            state = "is missing" if size is None else f"has {size} bytes instead of {entry['nbytes']}"
            problems.append(f"checkpoint {checkpoint}: {entry['file']} {state}")
        elif deep:
            problems += [f"checkpoint {checkpoint}: {problem}" for problem in damage(path, entry)]
    return tuple(problems)


def newest_verified(directory: Path, deep: bool = True) -> tuple[Path | None, tuple[str, ...]]:
    """The newest checkpoint without a problem (None when there is none), and the problems of newer ones."""
    problems: list[str] = []
    for checkpoint in reversed(list_checkpoints(directory)):
        found = verify(checkpoint, deep)
        if not found:
            return checkpoint, tuple(problems)
        problems += found
    return None, tuple(problems)


def checkpoint_holdings(checkpoint: Path) -> list[Holding]:
    """The checkpoint's files as holdings on disk, for the same transfer plan and ``load_state`` as memory.

    Raises ValueError when the manifest is damaged.
    """
    manifest = read_manifest(checkpoint)
    return [
        Holding(
            Snapshot(
                manifest["generation"],
                manifest["step"],
                index,
                manifest["layout"],
                tuple(record_of(piece) for piece in entry["pieces"]),
                manifest["meta"],
            ),
            slot=0,
            node="",
            role="primary",
            tier="disk",
            locator=str((checkpoint / entry["file"]).absolute()),
        )
        for index, entry in enumerate(manifest["files"])
    ]


def retain(directory: Path, num_to_keep: int | None) -> list[Path]:
    """Remove all but the newest ``num_to_keep`` (at least 1; None keeps all) intact checkpoints; return what went.

    Damaged ones stay, for a human to look at, and are not counted. The newest that passes a deep check always stays.
    """
    intact = [checkpoint for checkpoint in list_checkpoints(directory) if not verify(checkpoint, deep=False)]
    removed = intact[:-num_to_keep] if num_to_keep is not None else []
    if removed:
        verified, _ = newest_verified(directory, deep=True)
        removed = [checkpoint for checkpoint in removed if checkpoint != verified]
    for checkpoint in removed:
        # Renamed first: a removal that is cut short must not leave a folder that looks like a damaged checkpoint.
        doomed = checkpoint.with_name(f".{checkpoint.name}.{secrets.token_hex(4)}{_TEMPORARY}")
        os.rename(checkpoint, doomed)
        shutil.rmtree(doomed)
    return removed


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"


def _missing(manifest: Mapping[str, Any]) -> tuple[Piece, ...]:
    tensors = tuple(
        TensorSpec(name, tuple(tensor["shape"]), tensor["dtype"], None, "all")
        for name, tensor in manifest["tensors"].items()
    )
    boxes = [record_of(piece).piece for entry in manifest["files"] for piece in entry["pieces"]]
    return missing_boxes(Schema(tensors, 0), boxes)


def _mark(manifest: bytes) -> bytes:
    """What COMMITTED says about a manifest with this text."""
    digest = digest_of(np.frombuffer(manifest, np.uint8))
    return json.dumps({"format": FORMAT, "manifest": digest}).encode()


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
