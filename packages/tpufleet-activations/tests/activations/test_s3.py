"""S3 that fails as documented, and servers of others that lack something of it."""

from __future__ import annotations

import hashlib
import zlib

import pytest

from tests.activations.s3_server import s3_server
from tpufleet.errors import (
    BadInput,
    BadRequest,
    Conflict,
    NotFound,
    PermissionMissing,
    ProviderUnavailable,
)
from tpufleet.runtime.units import Units
from tpufleet_activations.io.remote_files import copy_object
from tpufleet_activations.io.shard_writer import BufferStream

boto3 = pytest.importorskip("boto3")
from botocore.config import Config  # noqa: E402  # needs boto3

from tpufleet_activations.io.s3 import S3Bucket  # noqa: E402  # needs boto3


@pytest.fixture
def server(monkeypatch):
    with s3_server() as state:
        monkeypatch.setenv("AWS_ENDPOINT_URL", state.url)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        yield state


class Pause:
    """Waits without taking time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def pause():
    return Pause()


@pytest.fixture
def bucket(server, pause):
    return S3Bucket("lab", "run", sleep=pause)


def crc32(data):
    return zlib.crc32(data).to_bytes(4, "big")


def sha256(data):
    return hashlib.sha256(data).digest()


REQUESTS = {
    "create": lambda bucket: bucket.create("units/a", b"{}"),
    "replace": lambda bucket: bucket.replace("workers/a", b"{}"),
    "put": lambda bucket: bucket.put(BufferStream([memoryview(b"shard")]), "shards/a"),
    "read": lambda bucket: bucket.read("stored"),
    "read_range": lambda bucket: bucket.read_range("stored", 1, 2),
    "size": lambda bucket: bucket.size("stored"),
    "names": lambda bucket: bucket.names("units/"),
    "delete": lambda bucket: bucket.delete("stored"),
}
UNAVAILABLE = {"slow-down": (503, "SlowDown"), "internal-error": (500, "InternalError")}


@pytest.mark.parametrize("failure", UNAVAILABLE.values(), ids=UNAVAILABLE)
@pytest.mark.parametrize("request_name", REQUESTS)
def test_two_minutes_of_server_errors_are_survived(server, bucket, pause, request_name, failure):
    server.objects["run/stored"] = b"contents"
    server.failure = lambda *_: failure if pause.seconds < 110 else None
    REQUESTS[request_name](bucket)
    assert 110 <= pause.seconds < 150


def test_a_server_that_stays_unavailable_is_an_error_after_two_minutes(server, bucket, pause):
    server.failure = lambda *_: (503, "SlowDown")
    with pytest.raises(ProviderUnavailable, match="SlowDown"):
        bucket.read("a")
    assert 120 <= pause.seconds < 150


def test_a_refused_connection_is_retried(server, pause, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(ProviderUnavailable, match=r"127\.0\.0\.1:9"):
        S3Bucket("lab", "run", sleep=pause).read("a")
    assert pause.seconds >= 120


def test_a_failed_part_of_a_listing_is_requested_again(server, bucket, pause):
    server.objects |= {f"run/units/{number}": b"" for number in range(8)}
    server.broken_bodies = 1
    failures = [None, (503, "SlowDown"), None]
    server.failure = lambda *_: failures.pop() if failures else None
    assert bucket.names("units/") == [f"units/{number}" for number in range(8)]
    assert len(server.requests) == 3 + 2
    assert pause.seconds > 0


def test_a_failed_file_upload_is_repeated(server, pause, tmp_path):
    client = boto3.client("s3", config=Config(retries={"total_max_attempts": 1}))
    server.failure = lambda *_: (503, "SlowDown") if pause.seconds < 110 else None
    bucket = S3Bucket("lab", "run", client, sleep=pause)
    draft = tmp_path / "draft"
    draft.write_bytes(b"shard")
    bucket.upload(draft, "shards/b")
    assert bucket.read("shards/b") == b"shard"


def test_a_claim_whose_response_is_lost_is_held(server, bucket):
    units = Units(bucket, count=1, worker="a")
    units.heartbeat()
    server.lost_responses = 1
    claim = units.claim()
    assert claim is not None and claim.unit == 0
    server.lost_responses = 1
    units.commit(claim, {"files": []})
    assert units.finished()
    assert bucket.names("units/") == ["units/00000000-0000.json", "units/00000000-0001.json"]


LARGE = bytes(range(256)) * (5 << 12)  # 5 MiB


@pytest.mark.parametrize("resets", [True, False], ids=["reset", "closed"])
def test_a_read_whose_connection_broke_is_repeated(server, bucket, resets):
    server.objects["run/a"] = LARGE
    server.broken_bodies, server.resets = 2, resets
    assert bucket.read("a") == LARGE
    assert len(server.requests) == 3
    server.broken_bodies = 2
    assert bucket.read_range("a", 1000, 4 << 20) == LARGE[1000 : 1000 + (4 << 20)]


def test_a_repeated_read_is_of_one_version(server, bucket):
    server.objects["run/a"], server.broken_bodies = LARGE, 1
    server.on_broken_body = lambda: server.objects.update({"run/a": LARGE[::-1]})
    assert bucket.read("a") == LARGE[::-1]


def test_a_read_that_breaks_each_time_is_an_error(server, bucket, pause):
    server.objects["run/a"], server.broken_bodies = LARGE, 1000
    with pytest.raises(ProviderUnavailable, match="s3://lab/run/a"):
        bucket.read("a")
    assert pause.seconds >= 120


SENT = {
    "in one piece": ({}, "md5:"),
    "in parts": ({"part_bytes": 1 << 20}, "md5/1048576:"),
    "with a key": ({"kms": True, "checksums": {"crc32": crc32}}, "crc32:"),
    "with a key, in parts": (
        {"kms": True, "part_bytes": 1 << 20, "checksums": {"sha256": sha256}},
        "sha256/1048576:",
    ),
}


@pytest.mark.parametrize("how, algorithm", SENT.values(), ids=SENT)
def test_a_copy_has_the_checksum_of_the_object(server, bucket, tmp_path, how, algorithm):
    content = server.objects["run/a"] = LARGE + b"the last part"
    vars(server).update(how)
    assert bucket.checksum("a").startswith(algorithm)
    assert copy_object(bucket, "a", tmp_path / "a").read_bytes() == content
    server.damaged_bodies = True
    with pytest.raises(Conflict, match="checksum"):
        copy_object(bucket, "a", tmp_path / "b")


IGNORES_CONDITIONS = "does not support conditional writes"


def test_a_server_that_ignores_conditions_is_refused_before_a_unit_is_claimed(server, bucket):
    server.conditions = False
    units = Units(bucket, count=1, worker="a")
    for _ in range(2):
        with pytest.raises(BadInput, match=IGNORES_CONDITIONS):
            units.claim()
    assert bucket.names("") == ["workers/a.json"]


def test_a_server_that_rejects_conditions_is_refused(server, bucket):
    server.failure = lambda method, key: (501, "NotImplemented") if method == "PUT" else None
    with pytest.raises(BadInput, match=IGNORES_CONDITIONS):
        bucket.create("units/a", b"{}")


def test_conditional_writes_are_tested_once_for_each_bucket(server, bucket, pause):
    bucket.create("a", b"")
    assert len(server.requests) == 3 + 1
    bucket.create("b", b"")
    S3Bucket("lab", "other", sleep=pause).create("a", b"")
    assert len(server.requests) == 3 + 3


def test_reading_does_not_test_conditional_writes(server, bucket):
    server.objects["run/a"], server.conditions = b"contents", False
    assert bucket.names("") == ["a"] and bucket.read("a") == b"contents"
    assert not any(request.startswith("PUT") for request in server.requests)


@pytest.mark.parametrize("failure", [(403, "AccessDenied"), (501, "NotImplemented")])
def test_conditional_writes_are_tested_without_deletes(server, bucket, failure):
    server.failure = lambda method, key: failure if method == "DELETE" else None
    assert bucket.create("a", b"")


PERMANENT = {
    "expired-token": (400, "ExpiredToken", PermissionMissing, "aws sso login"),
    "no-bucket": (404, "NoSuchBucket", NotFound, "bucket s3://lab does not exist"),
    "access-denied": (403, "AccessDenied", PermissionMissing, "s3:PutObject"),
    "wrong-key": (403, "InvalidAccessKeyId", PermissionMissing, "AWS_ACCESS_KEY_ID"),
    "invalid-request": (400, "InvalidRequest", BadRequest, "InvalidRequest"),
}


@pytest.mark.parametrize("case", PERMANENT.values(), ids=PERMANENT)
def test_a_permanent_error_is_not_repeated_and_says_what_to_do(server, bucket, pause, case):
    status, code, expected, advice = case
    server.failure = lambda *_: (status, code)
    with pytest.raises(expected, match=advice):
        bucket.replace("a", b"")
    assert pause.seconds == 0


def test_an_unknown_profile_is_named(server, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "laboratory")
    with pytest.raises(PermissionMissing, match=r"(?s)laboratory.*aws configure list-profiles"):
        S3Bucket("lab", "run")


def test_an_expired_login_says_how_to_renew_it(server, tmp_path, monkeypatch):
    config = tmp_path / "config"
    config.write_text(
        "[profile lab]\nsso_session = lab\nsso_account_id = 123456789012\nsso_role_name = reader\n"
        "[sso-session lab]\nsso_region = us-east-1\nsso_start_url = https://lab.awsapps.com/start\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(PermissionMissing, match="aws sso login"):
        S3Bucket("lab", "run").read("a")


def test_an_object_that_was_not_stored_completely_is_an_error(server, bucket, tmp_path):
    server.stored_bytes = 3
    draft = tmp_path / "draft"
    draft.write_bytes(b"shard")
    expected = r"shards/a: 5 bytes sent, 3 stored.*AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
    with pytest.raises(BadRequest, match=expected):
        bucket.put(BufferStream([memoryview(b"shard")]), "shards/a")
    with pytest.raises(BadRequest, match=expected):
        bucket.upload(draft, "shards/a")
    assert draft.exists()
