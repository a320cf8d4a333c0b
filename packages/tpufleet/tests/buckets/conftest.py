from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests import fake_gcs
from tpufleet.runtime import gcs


@pytest.fixture(scope="package")
def storage_url() -> Iterator[str]:
    with fake_gcs.server() as url:
        yield url


@pytest.fixture
def bucket(storage_url: str, monkeypatch: pytest.MonkeyPatch) -> gcs.Bucket:
    """A new bucket on fake-gcs-server, through the official client."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", storage_url)
    name = f"fleet-{uuid.uuid4().hex[:12]}"
    gcs.connect().create_bucket(name)
    return gcs.Bucket(f"gs://{name}/some/prefix")
