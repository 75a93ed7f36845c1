"""Small files in one folder, on a local disk or behind any pyarrow URI.

Both kinds offer the same few operations; what they guarantee is the least that a run folder needs: a write is seen
whole or not at all, and ``create`` has one winner.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qs, urlsplit

import psutil

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


class Storage(Protocol):
    """Files by name ("job.yaml", "lease/00000001.json") below ``url``."""

    url: str

    def read(self, name: str) -> bytes | None:
        """The file's bytes, or None when there is none."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Create or replace the file in one go."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Create the file unless it exists; False when it does. Of two callers at once, one gets True."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names ("folder/file") of the files right below ``folder``, sorted; empty when there is no such folder."""
        ...

    def remove(self, name: str) -> None:
        """Remove the file; nothing happens when there is none."""
        ...


def open_storage(url: str) -> Storage:
    """``url`` is a path (made absolute), file://… or a URI that pyarrow.fs understands. Raises ValueError otherwise."""
    scheme = urlsplit(url).scheme
    if "://" not in url:
        return LocalStorage(Path(url).expanduser().absolute())
    if scheme == "file":
        return LocalStorage(Path(urlsplit(url).path))
    from pyarrow.fs import FileSystem

    try:
        filesystem, path = FileSystem.from_uri(url)
    except (OSError, ValueError) as error:
        raise ValueError(f"storage_path {url!r} cannot be used: {error}") from None
    return ObjectStorage(filesystem, path, url)


class LocalStorage:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        os.replace(self._draft(name, data), self.folder / name)

    def create(self, name: str, data: bytes) -> bool:
        draft = self._draft(name, data)
        try:
            os.link(draft, self.folder / name)  # unlike O_EXCL, the file appears with its contents
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def names(self, folder: str) -> list[str]:
        found = (self.folder / folder).glob("*")
        return sorted(f"{folder}/{path.name}" for path in found if path.is_file() and not path.name.startswith("."))

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove the drafts of processes that were killed while writing."""
        for draft in (*self.folder.glob(".*.tmp"), *self.folder.glob("lease/.*.tmp")):
            pid = draft.name.split(".")[-2]
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                draft.unlink(missing_ok=True)

    def _draft(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(draft, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # a full disk is not helped by what did not fit
            draft.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from None
        return draft


class ObjectStorage:
    def __init__(self, filesystem: FileSystem, path: str, url: str) -> None:
        self._filesystem = filesystem
        self._path = path.rstrip("/")
        self.url = url.rstrip("/")

    def read(self, name: str) -> bytes | None:
        try:
            with self._filesystem.open_input_stream(f"{self._path}/{name}") as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        path = f"{self._path}/{name}"
        self._filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        with self._filesystem.open_output_stream(path) as stream:
            stream.write(data)

    def create(self, name: str, data: bytes) -> bool:
        """On S3 a conditional PUT. Other stores offer nothing through pyarrow: look, write, and read back."""
        if self._filesystem.type_name == "s3":
            return _put_if_absent(self.url, f"{self._path}/{name}", data)
        if self.read(name) is not None:
            return False
        self.write(name, data)
        return self.read(name) == data

    def names(self, folder: str) -> list[str]:
        from pyarrow.fs import FileSelector

        found = self._filesystem.get_file_info(FileSelector(f"{self._path}/{folder}", allow_not_found=True))
        return sorted(f"{folder}/{info.base_name}" for info in found if info.is_file)

    def remove(self, name: str) -> None:
        try:
            self._filesystem.delete_file(f"{self._path}/{name}")
        except FileNotFoundError:
            return


def _put_if_absent(url: str, path: str, data: bytes) -> bool:
    """PUT bucket/key with If-None-Match: *. Endpoint and region are the URI's, as pyarrow reads it."""
    import boto3
    from botocore.exceptions import ClientError

    options = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
    settings: dict[str, Any] = {}
    if "endpoint_override" in options:
        settings["endpoint_url"] = f"{options.get('scheme', 'https')}://{options['endpoint_override']}"
    if "region" in options:
        settings["region_name"] = options["region"]
    bucket, _, key = path.partition("/")
    try:
        boto3.client("s3", **settings).put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
    except ClientError as error:
        if error.response["Error"]["Code"] in ("PreconditionFailed", "ConditionalRequestConflict"):
            return False
        raise
    return True
