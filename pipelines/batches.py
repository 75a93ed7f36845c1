"""Global batches: a pure function of (corpus, tokenizer, config, seed, number of rows, cursor).

The order has three levels. An epoch is a permutation of the documents; a window is ``window_documents`` documents that
follow each other in it; its packed rows come in an order of their own. A global batch takes the next rows and
goes on over the ends of windows and epochs, so nothing is dropped and nothing is repeated.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from xxhash import xxh3_64

from pipelines.config import DataConfig
from pipelines.corpus import Corpus
from pipelines.order import Permutation, derive_key
from pipelines.packing import Array, Rows, join_rows, pack, padding_rows
from pipelines.tokenizer import encode, load

_WINDOWS_KEPT = 4  # the one in use, the next one, and two for ranks or evaluations that lag behind
_EVAL_SEED = "held out"  # the same rows whatever the seed of the run, so that runs can be compared


@dataclass(frozen=True, order=True)
class Cursor:
    """A row in the global order: the next one to be trained on. Also the id of a sample."""

    epoch: int = 0
    window: int = 0
    row: int = 0

    def to_list(self) -> list[int]:
        return [self.epoch, self.window, self.row]

    @classmethod
    def from_list(cls, values: list[int]) -> Cursor:
        epoch, window, row = values
        return cls(epoch, window, row)


def deal_rows(num_rows: int, data_size: int, data_rank: int) -> range:
    """Rows of a global batch for one data rank: neighbours, as even as possible, earlier ranks get the rest."""
    assert 0 <= data_rank < data_size
    share, rest = divmod(num_rows, data_size)
    start = data_rank * share + min(data_rank, rest)
    return range(start, start + share + (data_rank < rest))


def num_micro_batches(num_rows: int, data_size: int, micro_batch_rows: int) -> int:
    """Micro-batches per step, the same for all ranks: as many as the rank with most rows needs."""
    return -(-num_rows // (data_size * micro_batch_rows))


@dataclass(frozen=True, eq=False)
class RankBatch:
    """One data rank's part of a global batch.

    The arrays are int32 [num_micro_batches * micro_batch_rows, seq_len], rows in global order, then padding rows (all
    targets ``IGNORED``). ``num_valid`` and ``digest`` are those of the *global* batch, ``next`` the cursor after it.
    """

    tokens: Array
    targets: Array
    positions: Array
    segments: Array
    num_valid: int
    digest: str
    cursor: Cursor
    next: Cursor

    def to_dict(self) -> dict[str, Any]:
        """Plain arrays, numbers and text, fit for any transport."""
        return {**vars(self), "cursor": self.cursor.to_list(), "next": self.next.to_list()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RankBatch:
        """Copies the arrays: those that come out of an object store are read-only, which torch does not accept."""
        return cls(
            tokens=np.array(values["tokens"]),
            targets=np.array(values["targets"]),
            positions=np.array(values["positions"]),
            segments=np.array(values["segments"]),
            num_valid=values["num_valid"],
            digest=values["digest"],
            cursor=Cursor.from_list(values["cursor"]),
            next=Cursor.from_list(values["next"]),
        )


@dataclass(frozen=True, eq=False)
class Batch:
    """A global batch of B rows.

    ``rows``: int32 arrays [B, seq_len]. ``num_valid``: number of targets that are not ``IGNORED``. ``samples``: the ids
    of the rows that are not mere padding. ``digest``: hash over the samples' ids and contents, in order.
    """

    rows: Rows
    num_valid: int
    digest: str
    samples: tuple[Cursor, ...]
    cursor: Cursor
    next: Cursor

    def for_rank(self, data_size: int, data_rank: int, micro_batch_rows: int) -> RankBatch:
        """The part of one data rank, filled up with padding rows to ``num_micro_batches`` full micro-batches."""
        mine = deal_rows(len(self.rows), data_size, data_rank)
        num_rows = num_micro_batches(len(self.rows), data_size, micro_batch_rows) * micro_batch_rows
        missing = padding_rows(num_rows - len(mine), self.rows.tokens.shape[1])
        rows = join_rows([self.rows[mine.start : mine.stop], missing])
        return RankBatch(
            tokens=rows.tokens,
            targets=rows.targets,
            positions=rows.positions,
            segments=rows.segments,
            num_valid=self.num_valid,
            digest=self.digest,
            cursor=self.cursor,
            next=self.next,
        )


@dataclass(frozen=True, eq=False)
class Window:
    """The packed rows of a window and, for each, the hash of its content."""

    rows: Rows
    row_hashes: tuple[bytes, ...]


class WindowSource:
    """Some documents of a corpus in a keyed order, packed window by window. Keeps the last few windows built."""

    def __init__(
        self, corpus: Corpus, documents: tuple[int, ...], tokenizer: Tokenizer, config: DataConfig, seed: int | str
    ) -> None:
        assert documents, "no documents"
        self._corpus, self._documents, self._tokenizer = corpus, documents, tokenizer
        self._config, self._seed = config, seed
        self._kept: OrderedDict[tuple[int, int], Window] = OrderedDict()
        self.num_windows = -(-len(documents) // config.window_documents)

    def documents_of(self, epoch: int, window: int) -> list[int]:
        """The documents of one window, in order."""
        order = Permutation(len(self._documents), derive_key("documents", self._seed, epoch))
        size = self._config.window_documents
        positions = range(window * size, min((window + 1) * size, len(self._documents)))
        return [self._documents[order(position)] for position in positions]

    def window(self, epoch: int, window: int) -> Window:
        """Read, tokenise and pack one window, or take it from those kept."""
        at = (epoch, window)
        if at not in self._kept:
            self._kept[at] = self._build(epoch, window)
            if len(self._kept) > _WINDOWS_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(at)
        return self._kept[at]

    def _build(self, epoch: int, window: int) -> Window:
        texts = [self._corpus.read(document) for document in self.documents_of(epoch, window)]
        rows = pack(encode(self._tokenizer, texts), self._config.seq_len, derive_key("rows", self._seed, epoch, window))
        hashes = []
        for row in range(len(rows)):
            content = xxh3_64(rows.tokens[row].data)
            content.update(rows.targets[row].data)
            content.update(rows.segments[row].data)
            hashes.append(content.digest())
        return Window(rows, tuple(hashes))

    def take(self, cursor: Cursor, num_rows: int, last_epoch: int | None = None) -> Batch:
        """The ``num_rows`` rows from ``cursor`` on. Behind ``last_epoch`` there are only padding rows."""
        at, missing = cursor, num_rows
        parts: list[Rows] = []
        samples: list[Cursor] = []
        digest = xxh3_64()
        while missing and (last_epoch is None or at.epoch <= last_epoch):
            window = self._window_at(at)
            stop = min(at.row + missing, len(window.rows))
            parts.append(window.rows[at.row : stop])
            for row in range(at.row, stop):
                samples.append(Cursor(at.epoch, at.window, row))
                digest.update(np.array([at.epoch, at.window, row], "<i8").tobytes() + window.row_hashes[row])
            missing -= stop - at.row
            at = self._normal(Cursor(at.epoch, at.window, stop), len(window.rows))
        if missing:
            parts.append(padding_rows(missing, self._config.seq_len))
        rows = join_rows(parts)
        return Batch(rows, rows.num_valid, digest.hexdigest(), tuple(samples), cursor, at)

    def _window_at(self, at: Cursor) -> Window:
        if at.epoch >= 0 and 0 <= at.window < self.num_windows:
            window = self.window(at.epoch, at.window)
            if 0 <= at.row < len(window.rows):
                return window
        raise ValueError(f"{at} is not in this global order; it was made from other text or another data section")

    def _normal(self, at: Cursor, num_rows: int) -> Cursor:
        """A cursor always names a row that exists, so that equal positions are equal cursors."""
        if at.row < num_rows:
            return at
        if at.window + 1 < self.num_windows:
            return Cursor(at.epoch, at.window + 1, 0)
        return Cursor(at.epoch + 1, 0, 0)


class BatchBuilder:
    """Builds any global batch of a run. Not thread-safe; consecutive cursors share windows that are built once."""

    def __init__(self, corpus: Corpus, tokenizer_json: str, config: DataConfig, global_rows: int, seed: int) -> None:
        """``global_rows``: rows of a global batch (B). ``seed``: of the order."""
        train, held_out = corpus.split(config.eval_fraction)
        tokenizer = load(tokenizer_json)
        self._corpus, self._eval_fraction, self._global_rows = corpus, config.eval_fraction, global_rows
        self._train = WindowSource(corpus, train, tokenizer, config, seed)
        self._held_out = WindowSource(corpus, held_out, tokenizer, config, _EVAL_SEED) if held_out else None

    def batch(self, cursor: Cursor) -> Batch:
        """The global batch that starts at ``cursor``. Raises ValueError for a cursor of another order."""
        return self._train.take(cursor, self._global_rows)

    def build_window_after(self, cursor: Cursor) -> None:
        """Build the window after the cursor's ahead of need, since it takes longer than a batch."""
        last = cursor.window + 1 == self._train.num_windows
        self._train.window(cursor.epoch + last, 0 if last else cursor.window + 1)

    def eval_batch(self, num_rows: int) -> Batch:
        """The first ``num_rows`` rows of the held-out documents, the same in every run; padding rows where there are
        fewer. Raises ValueError if no document is held out."""
        self._corpus.require_held_out(self._eval_fraction)
        assert self._held_out is not None
        return self._held_out.take(Cursor(), num_rows, last_epoch=0)
