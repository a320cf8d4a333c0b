"""Datasets in S3 and stores that speak its protocol, through boto3."""

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

from tpufleet.errors import NotFound, PermissionMissing, ProviderUnavailable
from tpufleet.workloads.activations.io import staging as drafts

TRANSFER = TransferConfig(
    multipart_threshold=64 << 20, multipart_chunksize=32 << 20, max_concurrency=8
)
TAKEN = ("PreconditionFailed", "412")
# Two wrote the name at the same moment, and S3 has not decided: ask again.
UNDECIDED = ("ConditionalRequestConflict", "OperationAborted", "409")
MISSING = ("NoSuchKey", "NoSuchBucket", "404", "NotFound")
DENIED = ("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")
PATIENCE = 10  # times that an undecided name is asked for again


class S3Bucket:
    """Objects below `s3://bucket/prefix`. The endpoint comes from the usual AWS settings."""

    far = True

    def __init__(self, bucket: str, prefix: str, client: Any = None):
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.url = f"s3://{bucket}/{self._prefix}".rstrip("/")
        with _told(self.url):
            self._client = client or boto3.session.Session().client("s3")
        self._drafts = drafts.StagingFolder()

    def create(self, name: str, data: bytes) -> bool:
        with self._told(name):
            for wait in range(PATIENCE):
                try:
                    self._client.put_object(**self._key(name), Body=data, IfNoneMatch="*")
                    return True
                except ClientError as error:
                    if _code(error) in TAKEN:
                        return False
                    if _code(error) not in UNDECIDED:
                        raise
                time.sleep(0.05 * 2**wait)
        raise ProviderUnavailable(f"{self.url}/{name}: others write it all the time")

    def replace(self, name: str, data: bytes) -> None:
        with self._told(name):
            self._client.put_object(**self._key(name), Body=data)

    def read(self, name: str) -> bytes:
        return self._get(name)

    def names(self, prefix: str) -> list[str]:
        with self._told(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            return sorted(
                entry["Key"].removeprefix(self._prefix)
                for page in pages
                for entry in page.get("Contents", ())
            )

    def upload(self, draft: Path, name: str) -> None:
        with self._told(name):
            self._client.upload_file(str(draft), self._bucket, self._prefix + name, Config=TRANSFER)
        draft.unlink()

    def size(self, name: str) -> int:
        return self._head(name)["ContentLength"]

    def version(self, name: str) -> str:
        return self._head(name)["ETag"]

    def _head(self, name: str) -> dict[str, Any]:
        with self._told(name):
            return self._client.head_object(**self._key(name))

    def read_range(self, name: str, start: int, size: int) -> bytes:
        return self._get(name, Range=f"bytes={start}-{start + size - 1}")

    def delete(self, name: str) -> None:
        with self._told(name):
            self._client.delete_object(**self._key(name))

    def local_path(self, name: str) -> Path | None:
        return None

    def staging(self) -> Path:
        return self._drafts.path

    def _get(self, name: str, **more: Any) -> bytes:
        with self._told(name):
            return self._client.get_object(**self._key(name), **more)["Body"].read()

    def _key(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    def _told(self, name: str) -> Any:
        return _told(f"{self.url}/{name}")


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Amazon's errors as ours."""
    try:
        yield
    except ClientError as error:
        if _code(error) in MISSING:
            raise NotFound(f"{what} does not exist") from error
        if _code(error) in DENIED:
            raise PermissionMissing(f"may not use {what}: {error}") from error
        raise ProviderUnavailable(f"{what}: {error}") from error
    except NoCredentialsError as error:
        raise PermissionMissing(
            f"{what}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
        ) from error
    except (BotoCoreError, Boto3Error) as error:
        raise ProviderUnavailable(f"{what}: {error}") from error


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
