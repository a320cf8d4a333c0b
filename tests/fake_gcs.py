"""Runs fsouza/fake-gcs-server for tests that use Google's storage client."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from scripts import build_servers
from tests.polling import Patience
from tests.ports import free_port


def installed() -> str | None:
    """The path of the server, if there is one on this machine."""
    return os.environ.get("FAKE_GCS_SERVER") or build_servers.find("fake-gcs-server")


def binary() -> str:
    """The path of the server; skips the test when it is missing."""
    path = installed()
    if path is None:
        pytest.skip("fake-gcs-server not found; scripts/build_servers.py builds it")
    return path


@contextmanager
def server(host: str = "127.0.0.1") -> Iterator[str]:
    """Yields its URL, for STORAGE_EMULATOR_HOST. `host` is an address of this machine."""
    port = free_port()
    url = f"http://{host}:{port}"
    process = subprocess.Popen(
        [binary(), "-scheme", "http", "-host", host, "-port", str(port),
         "-backend", "memory", "-public-host", f"{host}:{port}", "-log-level", "error"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        patience = Patience(60)
        while True:
            try:
                urllib.request.urlopen(f"{url}/_internal/healthcheck", timeout=1)
                break
            except OSError:
                assert not patience.is_over and process.poll() is None, (
                    "fake-gcs-server did not start"
                )
                time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()
