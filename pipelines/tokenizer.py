"""Byte-level BPE, trained once on the corpus and cached by content. The driver trains; readers get the JSON.

Training and ``encode`` use the package's own threads (``TOKENIZERS_PARALLELISM=false`` turns them off); neither result
depends on them. Nothing here forks, which those threads would not survive.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from xxhash import xxh3_128_hexdigest

from pipelines.corpus import Corpus
from pipelines.order import Permutation, derive_key
from pipelines.packing import Array

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
_TRAINING_BYTES = 8 * 1024 * 1024  # more changes the merges little and the time to the first step much
_VERSION = 1


def train_or_load(corpus: Corpus, vocab_size: int) -> str:
    """JSON of the tokenizer of this corpus: from the cache, else trained and put there. Ids are below ``vocab_size``;
    a small corpus may not reach it."""
    wanted = f"{_VERSION}/{tokenizers.__version__}/{_TRAINING_BYTES}/{vocab_size}/{corpus.fingerprint}"
    path = cache_folder() / f"{xxh3_128_hexdigest(wanted.encode())}.json"
    cached = _read(path)
    if cached is not None:
        return cached
    trained = train(corpus, vocab_size)
    with suppress(OSError):  # a home that cannot be written costs only the training next time
        _write(path, trained)
    return trained


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/planaria/tokenizers``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "planaria" / "tokenizers"


def train(corpus: Corpus, vocab_size: int) -> str:
    """Train on a fixed sample of the documents. A function of the corpus and the size alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(corpus), trainer)
    return tokenizer.to_str()


def load(tokenizer_json: str) -> Tokenizer:
    """A tokenizer that takes the text of a special token for text like any other."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Array]:
    """Token ids of each text, end-of-text appended: int32 [n + 1]."""
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array([*encoding.ids, END_OF_TEXT_ID], np.int32) for encoding in encodings]


def _sample(corpus: Corpus) -> Iterator[str]:
    order = Permutation(len(corpus), derive_key("tokenizer"))
    num_bytes = 0
    for position in range(len(corpus)):
        if num_bytes >= _TRAINING_BYTES:
            return
        index = order(position)
        num_bytes += corpus.documents[index].size
        yield corpus.read(index)


def _read(path: Path) -> str | None:
    """A cached tokenizer; None if there is none or if it is not what was written."""
    try:
        digest, _, text = path.read_text().partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return text if digest == xxh3_128_hexdigest(text.encode()) else None


def _write(path: Path, text: str) -> None:
    """Whole or not at all; of two processes at once the last one wins, with equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{xxh3_128_hexdigest(text.encode())}\n{text}")
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
