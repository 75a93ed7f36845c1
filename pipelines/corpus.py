"""Documents: pieces of UTF-8 text files, named by a manifest that any node can check and read from.

``stdlib`` is the Python sources of the running interpreter's standard library. Of a folder every regular file is taken,
in the order of relative paths, but for those that are clearly not text (a zero byte in them), empty or hidden; a file
that is named itself must be text. In both, text that is not UTF-8 is refused, since leaving it out would be silent.
A file longer than ``MAX_DOCUMENT_BYTES`` is several documents, cut after a line where there is one: so a single
long file is shuffled and held out like many short ones, and the time to build a window has a bound.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from xxhash import xxh3_128, xxh3_128_hexdigest

from pipelines.order import derive_key

STDLIB = "stdlib"
MAX_DOCUMENT_BYTES = 64 * 1024
_FORMAT = 1
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """Bytes [start, start + size) of a file. ``path`` is relative to the corpus' root number ``root``."""

    root: int
    path: str
    start: int
    size: int
    digest: str  # xxh3-128 of the bytes


@dataclass(frozen=True)
class Corpus:
    """Text documents by index. ``roots`` are ``stdlib`` or absolute folders; where they lie does not matter to
    ``fingerprint``."""

    roots: tuple[str, ...]
    documents: tuple[Document, ...]

    @classmethod
    def open(cls, text: str | tuple[str, ...]) -> Corpus:
        """Read and hash all of ``DataConfig.text``. Raises ValueError, naming the path, for what cannot be used."""
        roots: list[str] = []
        documents: list[Document] = []
        seen: set[str] = set()
        for source in (text,) if isinstance(text, str) else text:
            if not source:
                raise ValueError("data.text is empty; it is 'stdlib', or files and folders")
            root, files = _files(source)
            num_before = len(documents)
            for path in files:
                real = os.path.realpath(os.path.join(_folder(root), path))
                if real not in seen:  # a file inside a folder that is named too is one document
                    seen.add(real)
                    documents += _pieces(source, len(roots), path, real)
            if len(documents) == num_before:
                raise ValueError(f"data.text: '{source}' holds no text that is not named already")
            roots.append(root)
        if not documents:
            raise ValueError("data.text names no source")
        return cls(tuple(roots), tuple(documents))

    @classmethod
    def from_manifest(cls, manifest: str) -> Corpus:
        """The corpus of ``manifest()``, on another node. Raises ValueError, naming it, for a file that is missing here
        or has another size; contents are checked as they are read."""
        values = json.loads(manifest)
        assert values["format"] == _FORMAT, f"manifest format {values['format']}"
        corpus = cls(tuple(values["roots"]), tuple(Document(*document) for document in values["documents"]))
        sizes = {(document.root, document.path): document.start + document.size for document in corpus.documents}
        for (root, path), size in sizes.items():
            name = os.path.join(_folder(corpus.roots[root]), path)
            try:
                found = os.stat(name).st_size
            except OSError as error:
                raise ValueError(f"data.text: cannot read '{name}' on this node ({error.strerror})") from None
            if found != size:
                raise ValueError(f"data.text: '{name}' has {found} bytes on this node, but {size} where the run began")
        return corpus

    def manifest(self) -> str:
        """JSON from which ``from_manifest`` makes this corpus again."""
        documents = [list(vars(document).values()) for document in self.documents]
        return json.dumps({"format": _FORMAT, "roots": self.roots, "documents": documents}, separators=(",", ":"))

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of all names and contents, in order."""
        digest = xxh3_128()
        for document in self.documents:
            digest.update(json.dumps(list(vars(document).values())).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.documents)

    def read(self, index: int) -> str:
        """The text of a document. Raises ValueError, naming the file, if it is not what the manifest says."""
        document = self.documents[index]
        name = os.path.join(_folder(self.roots[document.root]), document.path)
        try:
            with open(name, "rb") as file:
                file.seek(document.start)
                content = file.read(document.size)
        except OSError as error:
            raise ValueError(f"data.text: cannot read '{name}' ({error.strerror})") from None
        if xxh3_128_hexdigest(content) != document.digest:
            raise ValueError(f"data.text: '{name}' has changed since the run began")
        return content.decode()

    def split(self, eval_fraction: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(training, held-out) document indices. Held out are those with the smallest hash of their name: at least one
        if ``eval_fraction`` is not 0 and there are two documents, and never all."""
        if eval_fraction == 0 or len(self) < 2:
            return tuple(range(len(self))), ()
        num_held_out = min(max(1, round(eval_fraction * len(self))), len(self) - 1)

        def rank(index: int) -> tuple[int, int]:
            document = self.documents[index]
            return derive_key("held out", document.root, document.path, document.start), index

        held_out = set(sorted(range(len(self)), key=rank)[:num_held_out])
        return tuple(index for index in range(len(self)) if index not in held_out), tuple(sorted(held_out))

    def require_held_out(self, eval_fraction: float) -> None:
        """Raises ValueError if there would be nothing to evaluate on."""
        if not self.split(eval_fraction)[1]:
            raise ValueError(
                "nothing is held out for evaluation, since data.eval_fraction is 0 or data.text is one short document; "
                "give more text or set training.eval_every to 0"
            )


def _folder(root: str) -> str:
    return sysconfig.get_path(STDLIB) if root == STDLIB else root


def _files(source: str) -> tuple[str, list[str]]:
    """The root of one source and the sorted relative paths of its files."""
    if source == STDLIB:
        return STDLIB, [path for path in _walk(_folder(STDLIB), _NOT_STDLIB) if path.endswith(".py")]
    place = Path(source).expanduser().absolute()
    if place.is_dir():
        return str(place), _walk(str(place))
    if place.is_file():
        return str(place.parent), [place.name]
    raise ValueError(f"data.text: '{source}' is neither a file nor a folder; write {STDLIB} or paths of UTF-8 text")


def _walk(folder: str, left_out: frozenset[str] = frozenset()) -> list[str]:
    """Sorted relative paths of the regular files below a folder, without hidden ones and the folders left out."""

    def found() -> Iterator[str]:
        for place, folders, names in os.walk(folder, onerror=refuse):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
            for name in names:
                path = os.path.join(place, name)
                if not name.startswith(".") and os.path.isfile(path):
                    yield os.path.relpath(path, folder)

    def refuse(error: OSError) -> None:
        raise ValueError(f"data.text: cannot read '{error.filename}' ({error.strerror})")

    return sorted(found())


def _pieces(source: str, root: int, path: str, name: str) -> list[Document]:
    """The documents of one file; none for a file of a folder that is left out."""
    try:
        content = Path(name).read_bytes()
    except OSError as error:
        raise ValueError(f"data.text: cannot read '{name}' ({error.strerror})") from None
    named = os.path.realpath(os.path.expanduser(source)) == name
    if b"\0" in content or not content:
        if named:
            raise ValueError(f"data.text: '{source}' is {'not text' if content else 'empty'}")
        return []
    try:
        content.decode()
    except UnicodeDecodeError as error:
        if source == STDLIB:  # a few of its tests are written in other encodings on purpose
            return []
        raise ValueError(f"data.text: '{name}' is not UTF-8 text (byte {error.start})") from None
    documents = []
    start = 0
    while start < len(content):
        stop = _cut(content, start)
        documents.append(Document(root, path, start, stop - start, xxh3_128_hexdigest(content[start:stop])))
        start = stop
    return documents


def _cut(content: bytes, start: int) -> int:
    """Where the piece that begins at ``start`` ends: behind its last line, else between two characters."""
    stop = start + MAX_DOCUMENT_BYTES
    if stop >= len(content):
        return len(content)
    line = content.rfind(b"\n", start, stop) + 1
    if line > start:
        return line
    while content[stop] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        stop -= 1
    return stop
