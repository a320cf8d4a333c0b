"""Local object-store servers, and a proxy that fails some requests.

Tests are skipped without them: `pip install moto[server,s3] boto3 google-cloud-storage`; see
`tests.fake_gcs` for the GCS server.
"""

from __future__ import annotations

import http.client
import itertools
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from tests import fake_gcs
from tests.buckets.http_server import QuietHandler, serve
from tests.polling import Patience
from tests.ports import free_port
from tpufleet.runtime import gcs


def wait_for_server(url: str, process: subprocess.Popen) -> None:
    patience = Patience(60)
    while not patience.is_over:
        assert process.poll() is None, "the server exited"
        try:
            urllib.request.urlopen(url, timeout=2)
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"no response from {url}")


@pytest.fixture(scope="package")
def google():
    pytest.importorskip("google.cloud.storage")
    with fake_gcs.server() as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", url)
        client = gcs.connect()
        client.create_bucket("activations")
        yield client


@pytest.fixture(scope="package")
def amazon():
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("moto")
    pytest.importorskip("flask")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_server(f"http://127.0.0.1:{port}/moto-api/", process)
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    client.create_bucket(Bucket="activations")
    yield client
    process.terminate()
    process.wait()


@pytest.fixture(params=["gs", "s3"])
def cloud(request, monkeypatch) -> str:
    """A URL scheme that is served by one of these servers."""
    if request.param == "gs":
        request.getfixturevalue("google")
    else:
        client = request.getfixturevalue("amazon")
        monkeypatch.setenv("AWS_ENDPOINT_URL", client.meta.endpoint_url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
    return request.param


@contextmanager
def failing_proxy(target: str, every: int, *, after: bool) -> Iterator[str]:
    """The URL of a proxy to `target` that fails each `every`-th write: before forwarding it, or
    (`after`) after forwarding it, when only the response is lost."""
    writes = itertools.count(1)
    host = urlsplit(target).netloc

    class Proxy(QuietHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size)
            fails = self.command in ("PUT", "POST") and next(writes) % every == 0
            if fails and not after:
                return self._answer(503, b"slow down", {})
            there = http.client.HTTPConnection(host, timeout=900)
            there.request(self.command, self.path, body, dict(self.headers))
            answer = there.getresponse()
            content = answer.read()
            there.close()
            if fails:
                self.close_connection = True
                return None
            return self._answer(answer.status, content, dict(answer.getheaders()))

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one

        def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response_only(status)
            if self.command == "HEAD":
                content = b""
            else:
                headers = {k: v for k, v in headers.items() if k.lower() != "content-length"}
                headers["Content-Length"] = str(len(content))
            for name, value in headers.items():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    with serve(Proxy) as url:
        yield url
    assert next(writes) > every, "no write failed"
