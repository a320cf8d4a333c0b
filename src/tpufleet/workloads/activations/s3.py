"""Datasets in S3 and stores that speak its protocol, through boto3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from tpufleet.errors import NotFound, PermissionMissing
from tpufleet.workloads.activations.storage import temporary_staging

TRANSFER = TransferConfig(
    multipart_threshold=64 << 20, multipart_chunksize=32 << 20, max_concurrency=8
)
TAKEN = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
MISSING = ("NoSuchKey", "404", "NotFound")


class S3Bucket:
    """Objects below `s3://bucket/prefix`. The endpoint comes from the usual AWS settings."""

    def __init__(self, bucket: str, prefix: str, client: Any = None):
        self._client = client or boto3.client("s3")
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.url = f"s3://{bucket}/{self._prefix}".rstrip("/")

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._client.put_object(**self._key(name), Body=data, IfNoneMatch="*")
        except ClientError as error:
            if _code(error) in TAKEN:
                return False
            raise self._translated(error, name) from error
        return True

    def replace(self, name: str, data: bytes) -> None:
        self._client.put_object(**self._key(name), Body=data)

    def read(self, name: str) -> bytes:
        return self._get(name)

    def names(self, prefix: str) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        return sorted(
            entry["Key"].removeprefix(self._prefix)
            for page in pages
            for entry in page.get("Contents", ())
        )

    def upload(self, draft: Path, name: str) -> None:
        self._client.upload_file(str(draft), self._bucket, self._prefix + name, Config=TRANSFER)
        draft.unlink()

    def size(self, name: str) -> int:
        return self._head(name)["ContentLength"]

    def version(self, name: str) -> str:
        return self._head(name)["ETag"]

    def _head(self, name: str) -> dict[str, Any]:
        try:
            return self._client.head_object(**self._key(name))
        except ClientError as error:
            raise self._translated(error, name) from error

    def read_range(self, name: str, start: int, size: int) -> bytes:
        return self._get(name, Range=f"bytes={start}-{start + size - 1}")

    def delete(self, name: str) -> None:
        self._client.delete_object(**self._key(name))

    def local(self, name: str) -> Path | None:
        return None

    def staging(self) -> Path:
        return temporary_staging()

    def _get(self, name: str, **more: Any) -> bytes:
        try:
            return self._client.get_object(**self._key(name), **more)["Body"].read()
        except ClientError as error:
            raise self._translated(error, name) from error

    def _key(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    def _translated(self, error: ClientError, name: str) -> Exception:
        if _code(error) in MISSING:
            return NotFound(f"{self.url}/{name} does not exist")
        if _code(error) in ("AccessDenied", "403"):
            return PermissionMissing(f"may not use {self.url}/{name}: {error}")
        return error


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
