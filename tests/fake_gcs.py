"""A real storage server for tests: fsouza's fake-gcs-server, spoken to by Google's own client."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

VERSION = "v1.56.1"
INSTALL_HINT = (
    f"`CGO_ENABLED=0 go install github.com/fsouza/fake-gcs-server@{VERSION}` puts it into "
    "$(go env GOPATH)/bin; FAKE_GCS_SERVER may name it"
)


def binary() -> str:
    """Where the server is; skips the test, with how to get it, when there is none."""
    named = os.environ.get("FAKE_GCS_SERVER")
    found = named or shutil.which("fake-gcs-server")
    if found is None:
        beside = Path.home() / "go/bin/fake-gcs-server"
        found = str(beside) if beside.exists() else None
    if found is None:
        pytest.skip(f"no fake-gcs-server: {INSTALL_HINT}")
    return found


@contextmanager
def server() -> Iterator[str]:
    """Its URL, for STORAGE_EMULATOR_HOST."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [binary(), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port),
         "-backend", "memory", "-public-host", f"127.0.0.1:{port}", "-log-level", "error"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                urllib.request.urlopen(f"{url}/_internal/healthcheck", timeout=1)
                break
            except OSError:
                assert time.monotonic() < deadline and process.poll() is None, "it does not start"
                time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()
