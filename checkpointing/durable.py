"""Durable checkpoints: a folder of safetensors files, a manifest, and a mark that says it is whole.

    step-00001200/
        data/00000-00000.safetensors             parameters; node 0 of the plan, its first box of each tensor
        data/optimizer/00000-00000.safetensors   optimizer state, laid out alike
        manifest.json                            every file and piece: box, byte range, digest
        COMMITTED                                the manifest's digest

On object storage ``data`` lies one level deeper, under the attempt's own prefix; the manifest names its files either
way. Nothing is ever written into a committed checkpoint. Files are standard safetensors; their ``DCP_SHARDING_INFO``
lets torch's own reader join the boxes. Directories and checkpoints are locations: a path, or s3://… .
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from checkpointing.checkpoint_file import Share, damage, record_of, write_file
from checkpointing.checks import violations
from checkpointing.cover import StateLost, describe_missing, missing_boxes
from checkpointing.holding import Holding, verify_record
from checkpointing.publish import MANIFEST, MARK, Attempt, give_up, list_checkpoints, publish, step_of
from checkpointing.schema import Piece, Schema
from checkpointing.schema_json import schema_from_json, schema_to_json
from checkpointing.snapshot import Snapshot, digest_of
from checkpointing.storage import LocalStorage, Pace, Storage, join, open_storage, unpaced

FORMAT = 1
_FILES_AT_ONCE = 4


def write_share(
    location: str, shares: Sequence[tuple[Share, np.ndarray]], pace: Pace = unpaced
) -> list[dict[str, Any]]:
    """Write the shares' records, each found in its buffer (uint8, 1-d), below ``location`` (an attempt's ``url``).

    Returns one manifest entry per file. Raises DigestMismatch before a damaged record gets into a file, and OSError.
    """
    by_file: dict[str, list[tuple[Share, np.ndarray]]] = defaultdict(list)
    for share, buffer in shares:
        verify_record(share.record, buffer, str(share.holding), share.holding.key)
        by_file[share.file].append((share, share.record.data(buffer)))
    storage = open_storage(location)
    return [write_file(storage, file, by_file[file], pace) for file in sorted(by_file)]


def commit(attempt: Attempt, schema: Schema, snapshot: Snapshot, files: Iterable[Mapping[str, Any]]) -> str:
    """Turn a fully written ``attempt`` into a checkpoint; return its location. ``snapshot``: any rank's of the step.

    Raises StateLost when the files do not cover the schema, OSError when one is not there. When an intact checkpoint of
    the step is there already, it stays and the attempt is dropped; that of an exclusive attempt with FileExistsError.
    """
    manifest = {
        "format": FORMAT,
        "step": snapshot.step,
        "generation": snapshot.generation,
        "layout": snapshot.layout,
        "meta": snapshot.meta,
        **schema_to_json(schema),
        "files": sorted(
            ({**entry, "file": attempt.prefix + entry["file"]} for entry in files), key=lambda entry: entry["file"]
        ),
    }
    missing = _missing(manifest)
    if missing:
        raise StateLost(describe_missing(snapshot.step, missing), missing)
    _check_files(attempt, manifest)
    for there in () if attempt.exclusive else list_checkpoints(attempt.directory):
        if step_of(there) == snapshot.step and not verify(there, deep=True):
            give_up(attempt)
            return there
    text = json.dumps(manifest, indent=1).encode()
    return publish(attempt, text, _mark(text))


def read_manifest(checkpoint: str) -> dict[str, Any]:
    """The manifest, checked against COMMITTED. Raises ValueError naming what is wrong with it."""
    storage = open_storage(checkpoint)
    text, mark = storage.read(MANIFEST), storage.read(MARK)
    for name, content in ((MANIFEST, text), (MARK, mark)):
        if content is None:
            raise ValueError(f"checkpoint {checkpoint}: {name} is missing")
    assert text is not None
    if mark != _mark(text):
        raise ValueError(f"checkpoint {checkpoint}: {MARK} does not have the digest of {MANIFEST}")
    manifest = json.loads(text)
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"checkpoint {checkpoint}: format {manifest['format']} is not known; this version reads {FORMAT}"
        )
    return manifest


def verify(checkpoint: str, deep: bool) -> tuple[str, ...]:
    """What is wrong with a checkpoint, one sentence each; empty when it is whole.

    Shallow: manifest, presence and size of the files, exact cover of every tensor by boxes of its dtype. ``deep``
    also reads and digests every byte.
    """
    try:
        manifest = read_manifest(checkpoint)
    except ValueError as error:
        return (str(error),)
    storage = open_storage(checkpoint)
    problems = [str(found) for found in violations(schema_from_json(manifest), _holdings(manifest, storage))]
    sizes = storage.sizes("")
    whole = []
    for entry in manifest["files"]:
        size = sizes.get(entry["file"])
        if size == entry["nbytes"]:
            whole.append(entry)
        else:
            state = "is missing" if size is None else f"has {size} bytes instead of {entry['nbytes']}"
            problems.append(f"{entry['file']} {state}")
    if deep:
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            for found in pool.map(lambda entry: damage(storage, entry), whole):
                problems += found
    return tuple(f"checkpoint {checkpoint}: {problem}" for problem in problems)


def newest_verified(directory: str, deep: bool = True) -> tuple[str | None, tuple[str, ...]]:
    """The newest checkpoint without a problem (None when there is none), and the problems of newer ones."""
    problems: list[str] = []
    for checkpoint in reversed(list_checkpoints(directory)):
        found = verify(checkpoint, deep)
        if not found:
            return checkpoint, tuple(problems)
        problems += found
    return None, tuple(problems)


def checkpoint_holdings(checkpoint: str) -> list[Holding]:
    """The checkpoint's files as holdings, for the same transfer plan and ``load_state`` as memory.

    Raises ValueError when the manifest is damaged.
    """
    return _holdings(read_manifest(checkpoint), open_storage(checkpoint))


def _holdings(manifest: Mapping[str, Any], storage: Storage) -> list[Holding]:
    snapshot = Snapshot(
        manifest["generation"], manifest["step"], 0, manifest["layout"], records=(), meta=manifest["meta"]
    )
    return [
        Holding(
            replace(snapshot, rank=index, records=tuple(map(record_of, entry["pieces"]))),
            slot=0,
            node="",
            role="primary",
            tier="disk" if isinstance(storage, LocalStorage) else "s3",
            locator=join(storage.url, entry["file"]),
        )
        for index, entry in enumerate(manifest["files"])
    ]


def _missing(manifest: Mapping[str, Any]) -> tuple[Piece, ...]:
    boxes = [record_of(piece).piece for entry in manifest["files"] for piece in entry["pieces"]]
    return missing_boxes(schema_from_json(manifest), boxes)


def _check_files(attempt: Attempt, manifest: Mapping[str, Any]) -> None:
    """One listing, so that what a writer said is not all that a commit rests on."""
    sizes = open_storage(attempt.directory).sizes(attempt.name)
    for entry in manifest["files"]:
        name = f"{attempt.name}/{entry['file'].removeprefix(attempt.prefix)}"
        if sizes.get(name) != entry["nbytes"]:
            raise OSError(f"{name} has {sizes.get(name, 'no')} bytes where {entry['nbytes']} were written")


def _mark(manifest: bytes) -> bytes:
    """What COMMITTED says about a manifest with this text."""
    digest = digest_of(np.frombuffer(manifest, np.uint8))
    return json.dumps({"format": FORMAT, "manifest": digest}).encode()
