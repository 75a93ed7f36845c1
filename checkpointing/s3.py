"""S3 and what speaks its protocol, through boto3. Credentials come from AWS's own chain and are never written down.

A location's options: ``region``, ``endpoint_override`` (host:port) with ``scheme`` (https unless given), ``sse``
(AES256 or aws:kms) and ``sse_kms_key_id``. What is left out follows the usual environment variables
(AWS_ENDPOINT_URL_S3, AWS_REGION, …), which every node then needs.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from checkpointing.storage import Pace, flat, unpaced

_OPTIONS = ("region", "endpoint_override", "scheme", "sse", "sse_kms_key_id")
_PART_NBYTES = 16 << 20  # S3 takes none below 5 MiB but the last
_PARTS_FROM_NBYTES = _PART_NBYTES  # smaller files are one request
_MOST_PARTS = 10_000
_MOST_TRIES = 8
_FIRST_ANSWER_S = 3
_PARTS_AT_ONCE = 4  # of one file; so many parts are in memory beside the state
_UPLOAD_NOTE = ".upload"  # name + this holds the id of an unfinished multipart upload of ``name``
_MOST_DELETED_AT_ONCE = 1000


@lru_cache
def _client(region: str | None, endpoint: str | None) -> Any:
    """Thread-safe. Retries wait with jitter, a minute all in all on average.

    Botocore's newer mode "standard" gives up after some seconds: its waits begin at 50 ms, and all threads of a client
    share one quota of retries. A store that restarts is away for longer.
    """
    import boto3
    from botocore.config import Config

    config = Config(
        retries={"mode": "legacy", "total_max_attempts": _MOST_TRIES},
        connect_timeout=5,
        read_timeout=60,
        max_pool_connections=32,
    )
    return boto3.session.Session().client("s3", region_name=region, endpoint_url=endpoint, config=config)


@lru_cache
def _check_reachable(region: str | None, endpoint: str | None, bucket: str) -> None:
    """Ask once, without another try. Raises OSError when nothing listens, TimeoutError when there is no answer yet."""
    import boto3
    from botocore import exceptions
    from botocore.config import Config

    config = Config(retries={"total_max_attempts": 1}, connect_timeout=_FIRST_ANSWER_S, read_timeout=_FIRST_ANSWER_S)
    client = boto3.session.Session().client("s3", region_name=region, endpoint_url=endpoint, config=config)
    try:
        client.head_bucket(Bucket=bucket)
    except (exceptions.EndpointConnectionError, exceptions.ProxyConnectionError) as error:
        raise OSError(errno.ECONNREFUSED, " ".join(str(error).split()), f"s3://{bucket}") from None
    except (exceptions.ConnectTimeoutError, exceptions.ReadTimeoutError, exceptions.ConnectionClosedError):
        raise TimeoutError(f"waiting for {client.meta.endpoint_url}, which does not answer yet") from None
    except (exceptions.BotoCoreError, exceptions.ClientError):
        return  # it answers; or there is something else, which whoever comes next finds out


class S3Storage:
    """See ``Storage``. ``url``: s3://bucket/prefix?options."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query))
        unknown = sorted(set(options) - set(_OPTIONS))
        if not parts.netloc:
            raise ValueError(f"{url!r} names no bucket; write s3://bucket/prefix")
        if "@" in parts.netloc:
            raise ValueError("an s3:// location must not hold credentials; they come from AWS's own settings")
        if unknown:
            raise ValueError(f"{url!r} has the unknown option {unknown[0]!r}; known are {', '.join(_OPTIONS)}")
        self.url = url
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        host = options.get("endpoint_override")
        self._region = options.get("region")
        self._endpoint = f"{options.get('scheme', 'https')}://{host}" if host else None
        sse = {"ServerSideEncryption": options.get("sse"), "SSEKMSKeyId": options.get("sse_kms_key_id")}
        self._encryption = {name: value for name, value in sse.items() if value}

    def read(self, name: str) -> bytes | None:
        try:
            with self._errors(name):
                return bytes(self._s3.get_object(**self._at(name))["Body"].read())
        except FileNotFoundError:
            return None

    def read_range(self, name: str, start: int, nbytes: int) -> np.ndarray:
        if nbytes == 0:
            return np.empty(0, np.uint8)
        with self._errors(name):
            try:
                body = self._s3.get_object(**self._at(name), Range=f"bytes={start}-{start + nbytes - 1}")["Body"]
            except self._s3.exceptions.ClientError as error:
                if error.response["Error"]["Code"] in ("InvalidRange", "416"):  # the file ends before ``start``
                    return np.empty(0, np.uint8)
                raise
            return np.frombuffer(body.read(), np.uint8)

    def write(self, name: str, data: bytes) -> None:
        with self._errors(name):
            self._s3.put_object(**self._at(name), Body=data, **self._encryption)

    def create(self, name: str, data: bytes) -> bool:
        with self._errors(name):
            try:
                self._s3.put_object(**self._at(name), Body=data, IfNoneMatch="*", **self._encryption)
            except self._s3.exceptions.ClientError as error:
                if error.response["Error"]["Code"] in ("PreconditionFailed", "ConditionalRequestConflict"):
                    # A try whose answer was lost may have been ours: retries are boto3's, which cannot tell.
                    return self.read(name) == data
                raise
        return True

    def upload(self, name: str, buffers: Sequence[np.ndarray], pace: Pace = unpaced) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        if nbytes <= _PARTS_FROM_NBYTES:
            pace(nbytes)
            self.write(name, b"".join(map(flat, buffers)))
            return
        chunks = _chunks(buffers, max(_PART_NBYTES, -(-nbytes // _MOST_PARTS)))
        with self._errors(name):
            upload = {**self._at(name), **self._encryption}
            upload_id = self._s3.create_multipart_upload(**upload)["UploadId"]
            try:
                self.write(name + _UPLOAD_NOTE, upload_id.encode())
                parts = self._upload_parts(name, upload_id, chunks, pace)
                self._s3.complete_multipart_upload(
                    **self._at(name), UploadId=upload_id, MultipartUpload={"Parts": parts}
                )
            except BaseException:
                self._abort(name, upload_id)
                raise
            finally:
                self.remove(name + _UPLOAD_NOTE)

    def _upload_parts(self, name: str, upload_id: str, chunks: Iterator[bytes], pace: Pace) -> list[dict[str, Any]]:
        def upload_part(number: int, chunk: bytes) -> dict[str, Any]:
            which = {**self._at(name), "UploadId": upload_id, "PartNumber": number}
            answer = self._s3.upload_part(**which, Body=chunk)
            checksums = {
                key: value for key, value in answer.items() if key.startswith("Checksum") and "Type" not in key
            }
            return {"PartNumber": number, "ETag": answer["ETag"], **checksums}

        parts: list[dict[str, Any]] = []
        waiting: deque[Future[dict[str, Any]]] = deque()
        with ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
            try:
                for number, chunk in enumerate(chunks, 1):
                    pace(len(chunk))
                    waiting.append(pool.submit(upload_part, number, chunk))
                    if len(waiting) == _PARTS_AT_ONCE:
                        parts.append(waiting.popleft().result())
                parts += [future.result() for future in waiting]
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return parts

    def names(self, folder: str) -> list[str]:
        prefix = self._below(folder)
        found = [entry["Key"] for page in self._pages(prefix, "/") for entry in page.get("Contents", ())]
        return sorted(f"{folder}/{key.removeprefix(prefix)}" for key in found if key != prefix)

    def folders(self) -> list[str]:
        prefix = self._below("")
        found = [entry["Prefix"] for page in self._pages(prefix, "/") for entry in page.get("CommonPrefixes", ())]
        return sorted(key.removeprefix(prefix).rstrip("/") for key in found)

    def sizes(self, folder: str) -> dict[str, int]:
        base, pages = self._below(""), self._pages(self._below(folder))
        return {e["Key"].removeprefix(base): e["Size"] for page in pages for e in page.get("Contents", ())}

    def remove(self, name: str) -> None:
        with self._errors(name):
            self._s3.delete_object(**self._at(name))

    def remove_folder(self, folder: str) -> None:
        self.abort_uploads(folder)
        found = sorted(self.sizes(folder))
        with self._errors(folder):
            for first in range(0, len(found), _MOST_DELETED_AT_ONCE):
                keys = [{"Key": self._key(name)} for name in found[first : first + _MOST_DELETED_AT_ONCE]]
                self._s3.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})

    def abort_uploads(self, folder: str) -> None:
        """Uploads are found twice: by our notes, and by the store's own list, which not every store gives out."""
        for note in [name for name in self.sizes(folder) if name.endswith(_UPLOAD_NOTE)]:
            self._abort(note.removesuffix(_UPLOAD_NOTE), (self.read(note) or b"").decode())
            self.remove(note)
        for name, upload_id in self._listed_uploads(folder):
            self._abort(name, upload_id)

    def _listed_uploads(self, folder: str) -> list[tuple[str, str]]:
        """(name, upload id) of what the store lists as unfinished."""
        prefix, base = self._below(folder), self._below("")
        with self._errors(folder):
            pages = self._s3.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix)
            found = [upload for page in pages for upload in page.get("Uploads", ())]
            return [(u["Key"].removeprefix(base), u["UploadId"]) for u in found if u["Key"].startswith(prefix)]

    def _abort(self, name: str, upload_id: str) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._s3.abort_multipart_upload(**self._at(name), UploadId=upload_id)
        except (BotoCoreError, ClientError):
            return  # it is over already; or the store is away, and whoever sweeps finds the note

    def check_reachable(self) -> None:
        """See ``storage.check_reachable``."""
        _check_reachable(self._region, self._endpoint, self._bucket)

    @property
    def _s3(self) -> Any:
        return _client(self._region, self._endpoint)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _below(self, folder: str) -> str:
        """What the keys of everything in ``folder`` begin with."""
        key = self._key(folder).rstrip("/")
        return f"{key}/" if key else ""

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._key(name)}

    def _pages(self, prefix: str, delimiter: str = "") -> Iterator[dict[str, Any]]:
        with self._errors(prefix):
            listing = self._s3.get_paginator("list_objects_v2")
            yield from listing.paginate(Bucket=self._bucket, Prefix=prefix, Delimiter=delimiter)

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Botocore's errors as OSError, whose ``strerror`` says what went wrong and ``filename`` with what."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            code = error.response["Error"]["Code"]
            kind = errno.ENOENT if code in ("NoSuchKey", "404") else errno.EIO
            raise OSError(kind, " ".join(str(error).split()), f"s3://{self._bucket}/{self._key(name)}") from None
        except BotoCoreError as error:
            raise OSError(errno.EIO, " ".join(str(error).split()), f"s3://{self._bucket}/{self._key(name)}") from None


def _chunks(buffers: Sequence[np.ndarray], nbytes: int) -> Iterator[bytes]:
    """The buffers' bytes in chunks of ``nbytes``, the last one shorter."""
    waiting, missing = [], nbytes
    for buffer in buffers:
        rest = flat(buffer)
        while rest.nbytes:
            waiting.append(rest[:missing])
            rest, missing = rest[missing:], missing - waiting[-1].nbytes
            if not missing:
                yield b"".join(waiting)
                waiting, missing = [], nbytes
    if waiting:
        yield b"".join(waiting)
