from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests import storage
from tpufleet.runtime import buckets


@pytest.fixture(scope="session")
def storage_url() -> Iterator[str]:
    with storage.server() as url:
        yield url


@pytest.fixture
def bucket(storage_url: str, monkeypatch: pytest.MonkeyPatch) -> buckets.Bucket:
    """A fresh bucket on a real server, by the official client."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", storage_url)
    name = f"fleet-{uuid.uuid4().hex[:12]}"
    buckets.connect().create_bucket(name)
    return buckets.Bucket(f"gs://{name}/some/place")
