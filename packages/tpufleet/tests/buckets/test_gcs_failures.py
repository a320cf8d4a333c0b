"""Failures of Cloud Storage that fake-gcs-server does not have, from a server that answers as its
documentation says."""

from __future__ import annotations

import base64
import gzip
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("google.cloud.storage", reason="pip install 'tpufleet[gcs]'")

import google_crc32c

from tests.buckets.http_server import QuietHandler, serve
from tpufleet.errors import BadRequest, PermissionMissing, ProviderUnavailable
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.job.attempts import AttemptId
from tpufleet.runtime import gcs
from tpufleet.service.files.bucket_files import ArchivedLogs
from tpufleet_activations.io import remote_files
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.io.shard_writer import BufferStream

SESSION_BYTES = 9 << 20  # the client uploads more than 8 MiB in a session


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


class Storage(QuietHandler):
    """One object, which is uploaded in one request or in a session."""

    protocol_version = "HTTP/1.1"
    stored: bytes | None
    requests: list[str]

    def do_POST(self) -> None:
        self.requests.append("POST")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "uploadType=resumable" in self.path:
            return self.answer(200, Location=f"http://{self.headers['Host']}/session")
        return self.store(body.split(b"\r\n\r\n", 2)[2].rpartition(b"\r\n--")[0])

    def do_PUT(self) -> None:
        self.requests.append("PUT")
        self.store(self.rfile.read(int(self.headers["Content-Length"])))

    def do_GET(self) -> None:
        self.requests.append("GET")
        if "alt=media" not in self.path:
            return self.answer_json({"items": []})
        return self.media()

    def media(self) -> None:
        if self.stored is None:
            return self.answer(404)
        return self.answer(200, self.stored, **{"X-Goog-Hash": f"crc32c={crc32c(self.stored)}"})

    def do_DELETE(self) -> None:
        self.requests.append("DELETE")
        type(self).stored = None
        self.answer(204)

    def store(self, data: bytes) -> None:
        type(self).stored = data
        self.answer_json({"name": "x", "size": str(len(data)), "crc32c": crc32c(data)})

    def answer_json(self, body: object, status: int = 200) -> None:
        self.answer(status, json.dumps(body).encode(), **{"Content-Type": "application/json"})


@contextmanager
def storage_server(handler: type[Storage], patch: pytest.MonkeyPatch) -> Iterator[type[Storage]]:
    """Serves an own copy of the handler's state."""

    class Own(handler):  # type: ignore[valid-type,misc]
        stored = None
        requests: list[str] = []

    with serve(Own) as url:
        patch.setenv("STORAGE_EMULATOR_HOST", url)
        yield Own


class Damaging(Storage):
    """Damages the first uploads on the way."""

    damaged = 1

    def store(self, data: bytes) -> None:
        if type(self).damaged == 0:
            return super().store(data)
        type(self).damaged -= 1
        return super().store(b"?" + data[1:])


class Forgetting(Storage):
    """Loses the first session."""

    lost = 1

    def store(self, data: bytes) -> None:
        if type(self).lost == 0:
            return super().store(data)
        type(self).lost -= 1
        return self.answer(410)


class AlwaysDamaging(Damaging):
    damaged = 1000

    def media(self) -> None:
        self.answer(200, b"hello", **{"X-Goog-Hash": f"crc32c={crc32c(b'other')}"})


def uploads(tmp_path):
    """Every way to upload a file of this size."""
    data = bytes(range(256)) * (SESSION_BYTES // 256)
    for name in ("draft", "file"):
        (tmp_path / name).write_bytes(data)
    dataset = open_storage("gs://lab/run")
    return data, {
        "put": lambda: dataset.put(BufferStream([memoryview(data)]), "shards/1"),
        "upload": lambda: dataset.upload(tmp_path / "draft", "shards/1"),
        "bucket": lambda: gcs.Bucket("gs://lab/x").upload("y", tmp_path / "file"),
        "create": lambda: gcs.Bucket("gs://lab/x").create("y", tmp_path / "file"),
    }


WAYS = ["put", "upload", "bucket", "create"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("failure", [Damaging, Forgetting])
def test_an_upload_that_is_damaged_or_lost_is_sent_again(failure, way, tmp_path, monkeypatch):
    with storage_server(failure, monkeypatch) as server:
        data, ways = uploads(tmp_path)
        ways[way]()
        assert server.stored == data
        assert server.requests.count("PUT") == 2


@pytest.mark.parametrize("way", WAYS)
def test_an_upload_that_is_always_damaged_is_a_temporary_error(way, tmp_path, monkeypatch):
    with storage_server(AlwaysDamaging, monkeypatch) as server:
        _, ways = uploads(tmp_path)
        with pytest.raises(ProviderUnavailable):
            ways[way]()
        assert server.requests.count("PUT") == gcs.UPLOAD_SESSIONS
        assert server.stored is None


def test_a_damaged_download_is_a_temporary_error(tmp_path, monkeypatch):
    with storage_server(AlwaysDamaging, monkeypatch):
        bucket, dataset = gcs.Bucket("gs://lab/x"), open_storage("gs://lab/run")
        for read in (
            lambda: bucket.download("y", tmp_path / "y"),
            lambda: bucket.read("y"),
            lambda: dataset.read("units/1"),
        ):
            with pytest.raises(ProviderUnavailable):
                read()
        assert not (tmp_path / "y").exists()


def test_logs_are_archived_although_an_upload_was_damaged(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("google.cloud.storage.blob._MAX_MULTIPART_SIZE", 1)
    with storage_server(AlwaysDamaging, monkeypatch) as server:
        logs = ArchivedLogs(tmp_path, gcs.Bucket("gs://lab/x"))
        logs.append(AttemptId("job.0"), HostId("slice-a/0"), 0, b"hello\n")
        ended = threading.Event()
        ended.set()
        logs.upload_until(ended)
        assert "cannot upload logs to the bucket; retrying" in caplog.text
        server.damaged = 0
        logs.upload_until(ended)
        assert server.stored == b"hello\n"


class Breaking(Storage):
    """Breaks the first connections, each after longer than the client repeats requests."""

    broken = 2
    seconds = 0.3

    def do_PUT(self) -> None:
        if type(self).broken == 0:
            return super().do_PUT()
        type(self).broken -= 1
        self.requests.append("PUT")
        threading.Event().wait(self.seconds)
        self.close_connection = True
        return None


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if way == "bucket" else pytest.mark.slow) for way in WAYS],
)
def test_an_upload_that_breaks_after_the_clients_deadline_is_repeated(way, tmp_path, monkeypatch):
    monkeypatch.setattr(gcs, "RETRY_SECONDS", Breaking.seconds / 3)
    with storage_server(Breaking, monkeypatch) as server:
        data, ways = uploads(tmp_path)
        ways[way]()
        assert server.stored == data
        server.broken = 1000
        _, ways = uploads(tmp_path)
        with pytest.raises(ProviderUnavailable):
            ways[way]()
        assert server.requests.count("PUT") == 2 * gcs.REQUEST_TRIES


def test_the_time_to_send_a_request_fits_its_size_and_a_slow_uplink():
    sending, answer = gcs.upload_options(64 << 20)["timeout"]
    assert sending >= (64 << 20) * 8 / 1.2e6  # at 1.2 Mbit/s
    assert answer == gcs.TIMEOUT_SECONDS
    assert gcs.upload_options(1 << 40)["timeout"] == gcs.upload_options(100 << 20)["timeout"]


def test_credentials_of_a_user_without_a_project_are_enough(tmp_path, monkeypatch):
    user = {"type": "authorized_user", "client_id": "x", "client_secret": "y", "refresh_token": "z"}
    (tmp_path / "application_default_credentials.json").write_text(json.dumps(user))
    for name in ("GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    assert open_storage("gs://lab/run").url == "gs://lab/run"
    assert gcs.connect().project is None


class MetadataServer(QuietHandler):
    """Of a VM of Google Cloud."""

    protocol_version = "HTTP/1.1"
    token_status = 503

    def do_GET(self) -> None:
        status, body, kind = 200, b"", "text/plain"
        if "/token" in self.path:
            status = self.token_status
        elif "recursive" in self.path:
            body, kind = b'{"email": "a@b", "scopes": ["x"], "aliases": []}', "application/json"
        elif "universe" in self.path:
            body = b"googleapis.com"
        self.answer(status, body, **{"Metadata-Flavor": "Google", "Content-Type": kind})


class WithoutAccount(MetadataServer):
    token_status = 404


@pytest.mark.parametrize(
    ("handler", "error"),
    [(MetadataServer, "ProviderUnavailable"), (WithoutAccount, "PermissionMissing")],
    ids=["outage", "no account"],
)
def test_an_outage_of_the_metadata_server_is_temporary(handler, error, tmp_path):
    program = (
        "import time; time.sleep = lambda seconds: None\n"
        "from tpufleet.runtime import gcs\n"
        "gcs.Bucket('gs://lab/x').names()"
    )
    kept = {"PATH", "PYTHONPATH"}
    with serve(handler) as url:
        environ = {name: value for name, value in os.environ.items() if name in kept}
        hosts = ("GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT")
        environ |= dict.fromkeys(hosts, url.removeprefix("http://"))
        environ |= {"HOME": str(tmp_path), "CLOUDSDK_CONFIG": str(tmp_path)}
        ran = subprocess.run(
            [sys.executable, "-c", program], env=environ, capture_output=True, text=True
        )
    assert f"tpufleet.errors.{error}: gs://lab/x: " in ran.stderr


class Refusing(Storage):
    refusal: tuple[int, str, str]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        code, text, reason = self.refusal
        error = {"message": text, "domain": "global", "reason": reason}
        self.answer_json({"error": {"code": code, "message": text, "errors": [error]}}, code)

    do_GET = do_POST


# cloud.google.com/storage/docs/json_api/v1/status-codes
REFUSALS = {
    "a retention policy protects the object": (
        403,
        "Object 'lab/run/w' is subject to bucket's retention policy or object retention and cannot "
        "be deleted or overwritten until 2026-12-01",
        "retentionPolicyNotMet",
    ),
    "--no-temporary-hold": (
        403,
        "Object 'lab/run/w' is under active Temporary hold and cannot be deleted, overwritten or "
        "archived until hold is removed.",
        "objectUnderActiveHold",
    ),
    "Requester Pays are not supported": (
        400, "Bucket is a requester pays bucket but no user project provided.", "required",
    ),
    "gcloud billing projects link": (
        403,
        "The billing account for the owning project is disabled in state absent",
        "accountDisabled",
    ),
}  # fmt: skip


@pytest.mark.parametrize("advice", REFUSALS)
def test_a_refusal_that_no_role_changes_says_what_to_do(advice, monkeypatch):
    with storage_server(Refusing, monkeypatch) as server:
        server.refusal = REFUSALS[advice]
        dataset = open_storage("gs://lab/run")
        for use in (lambda: dataset.replace("w", b"{}"), lambda: dataset.names("")):
            with pytest.raises(BadRequest, match=advice) as refused:
                use()
            assert "roles/" not in str(refused.value)


def test_other_refusals_name_the_role(monkeypatch):
    with storage_server(Refusing, monkeypatch) as server:
        server.refusal = (403, "x does not have storage.objects.create access", "forbidden")
        with pytest.raises(PermissionMissing, match=r"grant storage\.objects\.create"):
            open_storage("gs://lab/run").replace("w", b"{}")


class Compressed(Storage):
    """An object that was uploaded with `gcloud storage cp --gzip-local`, which is sent as it is
    stored to clients that accept gzip."""

    text = random.Random(0).randbytes(300_000).hex().encode()
    content = gzip.compress(text)

    def do_GET(self) -> None:
        item = {
            "name": "d/a.jsonl",
            "size": str(len(self.content)),
            "generation": "1",
            "contentEncoding": "gzip",
        }
        if "alt=media" in self.path:
            self.requests.append("GET")
            assert "gzip" in self.headers["Accept-Encoding"]
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
            part = self.content[int(span[1]) : int(span[2]) + 1]
            self.answer(206, part, **{"Content-Encoding": "gzip"})
        elif self.path.split("?")[0].endswith("/o"):
            self.answer_json({"items": [item]})
        else:
            self.answer_json(item)


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_compressed_object_is_refused_whatever_its_size(tmp_path, monkeypatch, pieces):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with storage_server(Compressed, monkeypatch) as server:
        monkeypatch.setattr(remote_files, "PIECE", -(-len(server.content) // pieces))
        with pytest.raises(BadRequest, match="Content-Encoding: gzip"):
            remote_files.fetch("gs://lab/d/a.jsonl")
        assert len(server.requests) <= 4, "repeated in vain"
