"""Roles on a bucket: those of the documentation allow what jobs do, and an error names the
permission that is missing. A proxy checks roles as cloud.google.com/storage/docs/access-control/iam
documents them."""

from __future__ import annotations

import http.client
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("google.cloud.storage", reason="pip install 'tpufleet[gcs]'")

from tests.buckets.http_server import QuietHandler, serve
from tests.docs import markdown
from tpufleet.errors import PermissionMissing
from tpufleet.runtime import gcs
from tpufleet.runtime.checkpoints.buckets import BucketCheckpoints

# cloud.google.com/storage/docs/access-control/iam-roles, as far as it matters here.
PERMISSIONS = {
    "roles/storage.objectUser": {
        "storage.objects.create", "storage.objects.delete", "storage.objects.get",
        "storage.objects.list", "storage.objects.update",
    },
    "roles/storage.legacyBucketReader": {"storage.buckets.get", "storage.objects.list"},
}  # fmt: skip
METHODS = {"GET": "get", "HEAD": "get", "POST": "create", "PUT": "create", "DELETE": "delete"}


@dataclass(frozen=True)
class Grant:
    role: str
    prefix: str = ""  # of the names of resources; empty: without a condition

    def allows(self, permission: str, resource: str) -> bool:
        return permission in PERMISSIONS[self.role] and resource.startswith(self.prefix)


def documented_grants(account: str, bucket: str) -> list[Grant]:
    """What the commands in the documentation grant to an account on the bucket of the server."""
    grants = []
    for block in markdown.blocks("sh"):
        for line in block.text.splitlines():
            line = line.replace("$PROJECT-tpufleet", bucket).replace("'$PROJECT'-tpufleet", bucket)
            if f"buckets add-iam-policy-binding gs://{bucket}" not in line:
                continue
            words = shlex.split(line)
            options = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
            if not options["member"].startswith(f"serviceAccount:{account}@"):
                continue
            condition = options.get("condition", "None")
            name = re.search(r'resource\.name\.startsWith\("([^"]+)"\)$', condition)
            assert name or condition == "None", condition
            grants.append(Grant(options["role"], name[1] if name else ""))
    return grants


@contextmanager
def protected(target: str, grants: list[Grant]) -> Iterator[str]:
    """A proxy to a storage server, for an identity with these grants."""
    host = urlsplit(target).netloc

    class Proxy(QuietHandler):
        protocol_version = "HTTP/1.1"

        def check(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            _, _, rest = parts.path.partition("/b/")
            bucket, _, name = rest.partition("/o")
            on_bucket = f"projects/_/buckets/{bucket}"
            if self.command == "POST":
                name = "/" + (json_name(body) or unquote(dict_of(parts.query).get("name", "")))
            on_object = f"{on_bucket}/objects/{unquote(name[1:])}"
            lists = self.command == "GET" and not name[1:]
            permission = "list" if lists else METHODS[self.command]
            if not self.allowed(permission, on_bucket if lists else on_object):
                return self.deny(permission)
            there = http.client.HTTPConnection(host)
            there.request(self.command, self.path, body, dict(self.headers))
            answer = there.getresponse()
            content = answer.read()
            if answer.status == 404 and not self.allowed("list", on_bucket):
                return self.deny("list")
            kept = {
                key: value
                for key, value in answer.getheaders()
                if key.lower() not in ("content-length", "transfer-encoding", "connection")
            }
            return self.answer(answer.status, content, **kept)

        do_GET = do_POST = do_PUT = do_DELETE = check

        def allowed(self, permission: str, resource: str) -> bool:
            return any(grant.allows(f"storage.objects.{permission}", resource) for grant in grants)

        def deny(self, permission: str) -> None:
            text = (
                f"tpu-worker does not have storage.objects.{permission} access to the Google Cloud "
                f"Storage object. Permission 'storage.objects.{permission}' denied on resource (or "
                "it may not exist)."
            )
            self.answer(403, json.dumps({"error": {"code": 403, "message": text}}).encode())

    with serve(Proxy) as url:
        yield url


def json_name(body: bytes) -> str:
    match = re.search(rb'"name": ?"([^"]+)"', body)
    return match[1].decode() if match else ""


def dict_of(query: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in query.split("&") if "=" in pair)


@pytest.fixture
def location(bucket) -> str:
    return bucket.url.removesuffix("/some/prefix")


def test_the_documented_roles_of_jobs_allow_checkpoints_and_nothing_else(
    location, storage_url, tmp_path, monkeypatch
):
    grants = documented_grants("tpu-worker", location.removeprefix("gs://"))
    gcs.Bucket(location).write("snapshots/private.tar.gz", b"code")
    with protected(storage_url, grants) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        checkpoints = BucketCheckpoints(gcs.Bucket(f"{location}/checkpoints/job"), scratch=tmp_path)
        assert checkpoints.latest() is None
        checkpoints.save(1, lambda folder: (folder / "state").write_text("x"))
        assert checkpoints.latest().step == 1
        checkpoints.save(2, lambda folder: (folder / "state").write_text("y"))
        checkpoints.prune(1)
        server = gcs.Bucket(location)
        with pytest.raises(PermissionMissing, match=r"storage\.objects\.get"):
            server.read("snapshots/private.tar.gz")
        with pytest.raises(PermissionMissing, match=r"storage\.objects\.create"):
            server.write("snapshots/private.tar.gz", b"other code")


def test_an_error_names_the_permission_that_a_conditional_role_does_not_grant(
    location, storage_url, tmp_path, monkeypatch
):
    bucket = location.removeprefix("gs://")
    objects = f"projects/_/buckets/{bucket}/objects/checkpoints/"
    with protected(storage_url, [Grant("roles/storage.objectUser", objects)]) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        checkpoints = BucketCheckpoints(gcs.Bucket(f"{location}/checkpoints/job"), scratch=tmp_path)
        with pytest.raises(PermissionMissing) as denied:
            checkpoints.latest()
    assert "grant storage.objects.list on the bucket" in str(denied.value)
    assert "roles/storage.legacyBucketReader" in str(denied.value)
