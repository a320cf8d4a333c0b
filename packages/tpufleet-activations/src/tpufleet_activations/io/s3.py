"""Datasets in S3 and compatible object stores, through boto3."""

from __future__ import annotations

import base64
import contextlib
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

import boto3
import urllib3
from boto3.exceptions import Boto3Error
from botocore import exceptions
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from tpufleet.backoff import Backoff
from tpufleet.errors import (
    BadInput,
    BadRequest,
    NotFound,
    PermissionMissing,
    ProviderError,
    ProviderUnavailable,
    missing,
)
from tpufleet.runtime.object_store import PARALLEL_READS
from tpufleet_activations.io.storage import BucketStorage

MD5 = re.compile("[0-9a-f]{32}")
CHECKSUMS = {"ChecksumCRC32": "crc32", "ChecksumSHA1": "sha1", "ChecksumSHA256": "sha256"}
# Error codes, by what they mean here.
PRECONDITION_FAILED = ("PreconditionFailed", "412")
NOT_IMPLEMENTED = ("NotImplemented", "501")
NO_BUCKET = ("NoSuchBucket",)
MISSING = ("NoSuchKey", "404", "NotFound")
DENIED = ("AccessDenied", "AllAccessDisabled", "403", "Forbidden")
WRONG_KEY = ("InvalidAccessKeyId", "SignatureDoesNotMatch")
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired")
EXPIRED_LOGINS = (
    exceptions.SSOError,
    exceptions.TokenRetrievalError,
    exceptions.NoAuthTokenError,
    exceptions.CredentialRetrievalError,
)
# Those with a status of 500 or more are too. A conflict: another write of the name is under way.
TEMPORARY = (
    *("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"),
    *("RequestTimeout", "IncompleteBody", "BadDigest"),
    *("ConditionalRequestConflict", "OperationAborted", "409"),
)
# botocore raises those of urllib3 when a connection breaks within the body of a listing.
FAILURES = (BotoCoreError, ClientError, urllib3.exceptions.HTTPError)
BROKEN_CONNECTIONS = (
    exceptions.HTTPClientError,
    exceptions.ConnectionError,
    exceptions.IncompleteReadError,
    exceptions.FlexibleChecksumError,
    urllib3.exceptions.HTTPError,
)
# S3 answers 503 for minutes while it scales to more requests; Google's client waits as long.
RETRY_SECONDS = 120.0
LOGGED_FAILURES = 5  # after some seconds
CONNECT_SECONDS = 10
READ_SECONDS = 60

log = logging.getLogger(__name__)
T = TypeVar("T")
# Endpoints and buckets whose conditional writes work.
_conditional: set[tuple[str, str]] = set()
_conditional_lock = threading.Lock()


class S3Bucket(BucketStorage):
    """Objects below `s3://bucket/prefix`. The endpoint comes from the AWS configuration."""

    def __init__(
        self,
        bucket: str,
        prefix: str,
        client: Any = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._bucket = bucket
        super().__init__("s3", bucket, prefix)
        self._sleep = sleep
        with _translate_errors(self.url):
            self._client = client or _connect()

    def create(self, name: str, data: bytes) -> bool:
        """False also when a repeated request finds the object of the first, whose response was
        lost: callers compare the contents."""
        self._check_conditional_writes()
        with self._translate_errors(name):
            return self._create(name, data)

    def _create(self, name: str, data: bytes) -> bool:
        try:
            self._repeat(
                lambda: self._client.put_object(**self._key(name), Body=data, IfNoneMatch="*")
            )
        except ClientError as error:
            if _code(error) in PRECONDITION_FAILED:
                return False
            raise
        return True

    def _check_conditional_writes(self) -> None:
        """Some servers of others ignore If-None-Match, and every worker could claim every unit.
        Tested once in a process, and only before something is created."""
        key = (self._client.meta.endpoint_url, self._bucket)
        with _conditional_lock:
            if key in _conditional:
                return
            name = f"probes/{uuid.uuid4().hex}"
            with self._translate_errors(name):
                try:
                    ignored = self._create(name, b"1") and self._create(name, b"2")
                except ClientError as error:
                    if _code(error) not in NOT_IMPLEMENTED:
                        raise
                    ignored = True
            # A worker need not be allowed to delete, nor a server able to.
            with contextlib.suppress(ProviderError):
                self.delete(name)
            if ignored:
                raise BadInput(
                    f"{key[0]} does not support conditional writes (PutObject with If-None-Match), "
                    "so two workers could claim the same unit; upgrade the server, or use Amazon "
                    "S3, gs://… or a folder"
                )
            _conditional.add(key)

    def replace(self, name: str, data: bytes) -> None:
        with self._translate_errors(name):
            self._repeat(lambda: self._client.put_object(**self._key(name), Body=data))

    def read(self, name: str) -> bytes:
        return self._get(name)

    def names(self, prefix: str, start: str = "", end: str = "") -> list[str]:
        names: list[str] = []
        # A prefix without objects is no error: what may be missing is the bucket.
        with _translate_errors(f"the bucket s3://{self._bucket}"):
            for page in self._pages(prefix, start):
                for entry in page.get("Contents", ()):
                    name = entry["Key"].removeprefix(self._prefix)
                    if end and name >= end:
                        return sorted(names)
                    names.append(name)
        return sorted(names)

    def _pages(self, prefix: str, start: str) -> Iterator[dict[str, Any]]:
        options = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        if start:  # leaves out the name itself, which is no object for the ranges in use
            options["StartAfter"] = self._prefix + start
        while True:
            page = self._repeat(lambda: self._client.list_objects_v2(**options))
            yield page
            if not page.get("IsTruncated"):
                return
            options["ContinuationToken"] = page["NextContinuationToken"]

    def _send(self, content: Any, size: int, name: str) -> None:
        def send() -> dict[str, Any]:  # one request: it leaves nothing behind when its client dies
            content.seek(0)
            return self._client.put_object(**self._key(name), Body=content)

        with self._translate_errors(name):
            response = self._repeat(send)
        # Amazon returns the checksum that it has compared.
        if not any(field.startswith("Checksum") for field in response):
            self._check_size(name, size)

    def _check_size(self, name: str, sent: int) -> None:
        stored = self.size(name)
        if stored != sent:
            raise BadRequest(
                f"{self.url}/{name}: {sent} bytes sent, {stored} stored; if the server does not "
                "support checksums, set AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
            )

    def size(self, name: str) -> int:
        return self._head(name)["ContentLength"]

    def version(self, name: str) -> str:
        return self._head(name)["ETag"]

    def checksum(self, name: str) -> str:
        """The ETag, unless the object is encrypted with a key, or what was sent with it. After a
        `-` is the number of parts, whose digests it is of."""
        head = self._head(name, ChecksumMode="ENABLED")
        keyed = "SSECustomerAlgorithm" in head or "kms" in head.get("ServerSideEncryption", "")
        etag, _, count = head["ETag"].strip('"').partition("-")
        found = [("md5", etag, count)] if MD5.fullmatch(etag) and not keyed else []
        for field, algorithm in CHECKSUMS.items():
            if field in head:
                digest, _, count = head[field].partition("-")
                found.append((algorithm, base64.b64decode(digest).hex(), count))
        for algorithm, digest, count in sorted(found, key=lambda each: bool(each[2])):
            if not count:
                return f"{algorithm}:{digest}"
            if part := self._part_size(name, int(count), head["ContentLength"]):
                return f"{algorithm}/{part}:{digest}"
        return ""

    def _part_size(self, name: str, count: int, size: int) -> int:
        """Of all parts of an object but the last; 0 if they differ."""
        first, last = (self._head(name, PartNumber=n)["ContentLength"] for n in (1, count))
        return first if first * (count - 1) + last == size else 0

    def _head(self, name: str, **options: Any) -> dict[str, Any]:
        with self._translate_errors(name):
            return self._repeat(lambda: self._client.head_object(**self._key(name), **options))

    def read_range(self, name: str, start: int, size: int) -> bytes:
        return self._get(name, Range=f"bytes={start}-{start + size - 1}")

    def delete(self, name: str) -> None:
        with self._translate_errors(name):
            self._repeat(lambda: self._client.delete_object(**self._key(name)))

    def _get(self, name: str, **options: str) -> bytes:
        """All of one version, since a repeated request starts from the beginning."""

        def receive() -> bytes:
            return self._client.get_object(**self._key(name), **options)["Body"].read()

        with self._translate_errors(name):
            return self._repeat(receive)

    def _repeat(self, request: Callable[[], T]) -> T:
        """The response to a request that is repeated while S3 fails temporarily."""
        backoff, waited = Backoff(first=0.1, longest=15.0), 0.0
        while True:
            try:
                return request()
            except FAILURES as error:
                if waited >= RETRY_SECONDS or not _is_temporary(error):
                    raise
                delay = backoff.failed()
                if backoff.failures >= LOGGED_FAILURES:
                    log.warning("%s: %s; retrying in %.0f s", self.url, error, delay)
            self._sleep(delay)
            waited += delay

    def _key(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    def _translate_errors(self, name: str) -> Any:
        return _translate_errors(f"{self.url}/{name}")


def _connect() -> Any:
    config = Config(
        retries={"total_max_attempts": 1},  # `S3Bucket` repeats requests
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        max_pool_connections=PARALLEL_READS,
    )
    return boto3.session.Session().client("s3", config=config)


def _is_temporary(error: Exception) -> bool:
    if not isinstance(error, ClientError):
        return isinstance(error, BROKEN_CONNECTIONS)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status == HTTPStatus.NOT_IMPLEMENTED:
        return False
    return status >= 500 or status == HTTPStatus.TOO_MANY_REQUESTS or _code(error) in TEMPORARY


@contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    """Raise tpufleet's errors in place of boto3's."""
    try:
        yield
    except ClientError as error:
        code = _code(error)
        if code in NO_BUCKET:
            bucket = url[url.index("s3://") :].split("/")[2]
            absent = missing(f"the bucket s3://{bucket}")
            raise NotFound(f"{absent}; create it with `aws s3 mb s3://{bucket}`") from error
        if code in MISSING:
            raise missing(url) from error
        if code in (*EXPIRED, *WRONG_KEY):
            raise _no_credentials(url, error) from error
        if code in DENIED:
            raise PermissionMissing(
                f"access to {url} denied: {error}; grant s3:ListBucket on the bucket, and "
                "s3:GetObject, s3:PutObject and s3:DeleteObject on its objects, to this identity"
            ) from error
        if _is_temporary(error):
            raise ProviderUnavailable(f"{url}: {error}") from error
        raise BadRequest(f"{url}: {error}") from error
    except (exceptions.ProfileNotFound, *EXPIRED_LOGINS, NoCredentialsError) as error:
        raise _no_credentials(url, error) from error
    except (BotoCoreError, Boto3Error, urllib3.exceptions.HTTPError) as error:
        raise ProviderUnavailable(f"{url}: {error}") from error


def _no_credentials(url: str, error: Exception) -> PermissionMissing:
    return PermissionMissing(
        f"{url}: no valid AWS credentials: {error}\n"
        "  next: run `aws sso login`, set AWS_PROFILE to one of `aws configure list-profiles`, or "
        "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if needed, AWS_SESSION_TOKEN"
    )


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
