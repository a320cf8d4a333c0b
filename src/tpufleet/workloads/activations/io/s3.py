"""Datasets in S3 and compatible object stores, through boto3."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from tpufleet.backoff import Backoff
from tpufleet.errors import NotFound, PermissionMissing, ProviderUnavailable
from tpufleet.workloads.activations.io.shard_writer import BufferStream, DraftFile, MemoryFile
from tpufleet.workloads.activations.io.staging import StagingFolder

FILE_BYTES = 64 << 20  # of a shard: see `gcs`
# A single request leaves nothing behind when its client dies; S3 takes 5 GB in one.
LARGEST_PUT = 4 << 30
TRANSFER = TransferConfig(
    multipart_threshold=64 << 20, multipart_chunksize=32 << 20, max_concurrency=8
)
# Error codes, by what they mean here.
EXISTS = ("PreconditionFailed", "412")
CONFLICT = ("ConditionalRequestConflict", "OperationAborted", "409")  # concurrent write: retry
MISSING = ("NoSuchKey", "NoSuchBucket", "404", "NotFound")
DENIED = ("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")
CONFLICT_TRIES = 10


class S3Bucket:
    """Objects below `s3://bucket/prefix`. The endpoint comes from the AWS configuration."""

    far = True
    file_bytes: int | None = FILE_BYTES

    def __init__(self, bucket: str, prefix: str, client: Any = None):
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.url = f"s3://{bucket}/{self._prefix}".rstrip("/")
        with _translate_errors(self.url):
            self._client = client or boto3.session.Session().client("s3")
        self._staging = StagingFolder()

    def create(self, name: str, data: bytes) -> bool:
        with self._translate_errors(name):
            backoff = Backoff(first=0.05, longest=30.0)
            for _ in range(CONFLICT_TRIES):
                try:
                    self._client.put_object(**self._key(name), Body=data, IfNoneMatch="*")
                    return True
                except ClientError as error:
                    if _code(error) in EXISTS:
                        return False
                    if _code(error) not in CONFLICT:
                        raise
                time.sleep(backoff.failed())
        raise ProviderUnavailable(
            f"{self.url}/{name}: {CONFLICT_TRIES} conditional writes conflicted with other writers"
        )

    def replace(self, name: str, data: bytes) -> None:
        with self._translate_errors(name):
            self._client.put_object(**self._key(name), Body=data)

    def read(self, name: str) -> bytes:
        return self._get(name)

    def names(self, prefix: str, start: str = "", end: str = "") -> list[str]:
        names: list[str] = []
        # A prefix without objects is no error: what may be missing is the bucket.
        with _translate_errors(f"the bucket s3://{self._bucket}"):
            # StartAfter leaves out the name itself, which is no object for the ranges in use.
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket,
                Prefix=self._prefix + prefix,
                **({"StartAfter": self._prefix + start} if start else {}),
            )
            for page in pages:
                for entry in page.get("Contents", ()):
                    name = entry["Key"].removeprefix(self._prefix)
                    if end and name >= end:
                        return sorted(names)
                    names.append(name)
        return sorted(names)

    def new_shard(self, name: str, draft: str) -> DraftFile | MemoryFile:
        return MemoryFile()

    def write_mode(self) -> str:
        return "upload"

    def put(self, content: BufferStream, name: str) -> None:
        with self._translate_errors(name):
            if content.size <= LARGEST_PUT:
                self._client.put_object(**self._key(name), Body=content)
            else:
                key = self._prefix + name
                self._client.upload_fileobj(content, self._bucket, key, Config=TRANSFER)

    def upload(self, draft: Path, name: str) -> None:
        with self._translate_errors(name):
            self._client.upload_file(str(draft), self._bucket, self._prefix + name, Config=TRANSFER)
        draft.unlink()

    def size(self, name: str) -> int:
        return self._head(name)["ContentLength"]

    def version(self, name: str) -> str:
        return self._head(name)["ETag"]

    def _head(self, name: str) -> dict[str, Any]:
        with self._translate_errors(name):
            return self._client.head_object(**self._key(name))

    def read_range(self, name: str, start: int, size: int) -> bytes:
        return self._get(name, Range=f"bytes={start}-{start + size - 1}")

    def delete(self, name: str) -> None:
        with self._translate_errors(name):
            self._client.delete_object(**self._key(name))

    def local_path(self, name: str) -> Path | None:
        return None

    def staging(self) -> Path:
        return self._staging.path

    def _get(self, name: str, **options: Any) -> bytes:
        with self._translate_errors(name):
            return self._client.get_object(**self._key(name), **options)["Body"].read()

    def _key(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    def _translate_errors(self, name: str) -> Any:
        return _translate_errors(f"{self.url}/{name}")


@contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    """Raise tpufleet's errors in place of boto3's."""
    try:
        yield
    except ClientError as error:
        if _code(error) in MISSING:
            raise NotFound(f"{url} does not exist") from error
        if _code(error) in DENIED:
            raise PermissionMissing(f"access to {url} denied: {error}") from error
        raise ProviderUnavailable(f"{url}: {error}") from error
    except NoCredentialsError as error:
        raise PermissionMissing(
            f"{url}: no AWS credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or AWS_PROFILE"
        ) from error
    except (BotoCoreError, Boto3Error) as error:
        raise ProviderUnavailable(f"{url}: {error}") from error


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
