"""Which checkpoints stay: rules that each keep some, and what no rule can remove."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from checkpointing.config import CheckpointConfig, KeepRule
from checkpointing.durable import newest_verified, verify
from checkpointing.publish import list_checkpoints, remove, step_of
from checkpointing.storage import LocalStorage, join, open_storage, split

Metrics = Callable[[], Mapping[int, Mapping[str, Any]]]  # step -> its line of metrics.jsonl
_READERS = "readers"
_READER_LASTS_S = 60.0


def kept(steps: Sequence[int], config: CheckpointConfig, metrics: Metrics) -> set[int]:
    """The steps that at least one of the rules keeps. ``metrics`` is called only for a rule that needs it."""
    if config.num_to_keep is None:
        return set(steps)
    rules = (KeepRule(latest=config.num_to_keep), *config.keep)
    return {step for rule in rules for step in _kept_by(rule, sorted(steps), metrics)}


def _kept_by(rule: KeepRule, steps: Sequence[int], metrics: Metrics) -> Sequence[int]:
    if rule.latest is not None:
        return steps[-rule.latest :]
    if rule.every_steps is not None:
        return [step for step in steps if step % rule.every_steps == 0]
    lines = metrics()
    scores = {step: lines.get(step, {}).get(rule.metric) for step in steps}
    sign = 1 if rule.mode == "min" else -1
    known = [(sign * score, -step) for step, score in scores.items() if isinstance(score, int | float)]
    return [-step for _, step in sorted(known)[: rule.best]]


def superfluous(directory: str, config: CheckpointConfig, metrics: Metrics) -> list[str]:
    """Intact checkpoints that may go, oldest first.

    Damaged ones stay, for a human to look at, and are not counted. The newest that passes a deep check always stays,
    and so does one that somebody reads.
    """
    intact = [checkpoint for checkpoint in list_checkpoints(directory) if not verify(checkpoint, deep=False)]
    wanted = kept([step_of(checkpoint) for checkpoint in intact], config, metrics)
    doomed = [checkpoint for checkpoint in intact if step_of(checkpoint) not in wanted]
    if doomed:
        verified, _ = newest_verified(directory, deep=True)
        stay = _being_read(directory) | {verified}
        doomed = [checkpoint for checkpoint in doomed if checkpoint not in stay]
    return doomed


def retain(directory: str, config: CheckpointConfig, metrics: Metrics) -> list[str]:
    """Remove what is superfluous; return what went."""
    removed = []
    for checkpoint in superfluous(directory, config, metrics):
        if checkpoint not in _being_read(directory):
            remove(checkpoint)
            removed.append(checkpoint)
    return removed


@contextmanager
def reading(checkpoint: str) -> Iterator[None]:
    """Inside the block nobody's retention removes the checkpoint. The mark of a reader that died lasts a minute.

    Who may only read leaves no mark, and so has no such promise.
    """
    place = open_storage(checkpoint)
    if isinstance(place, LocalStorage):
        checkpoint = str(place.folder.resolve())  # retention does not know the links that lead to it
    directory, folder = split(checkpoint)
    storage, name = open_storage(directory), f"{_READERS}/{folder}.{secrets.token_hex(4)}.json"
    over = threading.Event()

    def mark() -> bool:
        text = json.dumps({"format": 1, "until": time.time() + _READER_LASTS_S}).encode()
        for _ in range(3):
            try:
                storage.write(name, text)
                return True
            except FileNotFoundError:  # another reader was through, and took the empty folder with it
                continue
            except OSError:
                return False
        return False

    def renew() -> None:
        while not over.wait(_READER_LASTS_S / 3):
            mark()

    renewal = threading.Thread(target=renew, name="reading", daemon=True)
    marked = False
    try:
        marked = mark()
        if marked:
            renewal.start()
        yield
    finally:
        over.set()
        if renewal.ident is not None:
            renewal.join()
        if marked:
            storage.remove(name)


def _being_read(directory: str) -> set[str]:
    """Checkpoints with a mark that has not run out; marks that have are removed."""
    storage, found = open_storage(directory), set()
    for name in storage.names(_READERS):
        mark = storage.read(name)
        if mark is not None and json.loads(mark)["until"] > time.time():
            found.add(join(directory, name.removeprefix(f"{_READERS}/").rsplit(".", 2)[0]))
        else:
            storage.remove(name)
    return found
