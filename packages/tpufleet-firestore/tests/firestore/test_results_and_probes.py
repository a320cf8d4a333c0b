"""Large results in a bucket on a real storage server, their cleanup, and the bridge's probes."""

from __future__ import annotations

import signal
import time
import urllib.error
import urllib.request
import uuid

import pytest

pytest.importorskip("google.cloud.storage", reason="pip install 'tpufleet[gcs]'")

from google.cloud import storage

from tests import fake_gcs as servers
from tests.firestore.harness import BridgeHarness
from tests.server_process import wait_until
from tpufleet.errors import Conflict
from tpufleet.model.job.jobs import JobId
from tpufleet_firestore.bridge import large_results
from tpufleet_testbed.kubernetes import cluster_layout


@pytest.fixture(scope="module")
def storage_url():
    with servers.server() as url:
        yield url


@pytest.fixture
def bucket(storage_url, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", storage_url)
    return storage.Client().create_bucket(f"results-{uuid.uuid4().hex[:12]}")


def test_a_bucket_stores_the_first_result_of_a_job_until_it_is_deleted(bucket):
    store = large_results.result_store(f"gs://{bucket.name}/some/folder", lambda job_id: "")
    url = store.put(JobId("fs-1"), "é" * 3)
    assert url == f"gs://{bucket.name}/some/folder/fs-1.txt"
    assert store.put(JobId("fs-1"), "other") == url
    blob = bucket.blob("some/folder/fs-1.txt")
    assert blob.download_as_text() == "é" * 3
    store.delete(JobId("fs-1"))
    store.delete(JobId("fs-1"))
    assert not blob.exists()


@pytest.mark.slow
def test_a_large_result_and_its_code_are_deleted_after_the_retention(
    harness: BridgeHarness, bucket
):
    location = f"gs://{bucket.name}/out"
    first = harness.start_bridge("--results", location)
    name = harness.add("result = 'x' * 2_000_000")
    found = harness.wait_ended(name)
    job = found["bridge"]["job"]
    assert found["result_url"] == f"{location}/{job}.txt"
    assert found["result"].startswith("xxx") and len(found["result"]) < 2000
    blob = bucket.blob(f"out/{job}.txt")
    assert blob.download_as_text() == "x" * 2_000_000
    client = harness.server.client
    digest = client.job(job).job.snapshot
    assert client.has_snapshot(digest) and client.result(job)
    first.terminate()
    assert first.wait(900) == 0
    harness.bridges.remove(first)

    ended = found["completed_at"].timestamp()
    wait_until(lambda: time.time() > ended + 1.5, 10, harness.diagnostics)
    harness.start_bridge("--results", location, "--keep", "1s")
    wait_until(lambda: not blob.exists(), 60, harness.diagnostics)
    wait_until(lambda: not client.has_snapshot(digest), 60, harness.diagnostics)
    with pytest.raises(Conflict, match="were deleted"):
        client.result(job)
    wait_until(lambda: "result_url" not in harness.get(name), 60, harness.diagnostics)
    assert harness.get(name)["status"] == "completed"


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=900) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def test_probes_report_when_the_bridge_is_ready(harness: BridgeHarness):
    address = f"127.0.0.1:{cluster_layout.free_ports(1)[0]}"
    bridge = harness.start_bridge("--probes", address, "--heartbeat", "0.5")
    wait_until(lambda: fetch(f"http://{address}/readyz") == (200, "ok\n"), 60, harness.diagnostics)
    assert fetch(f"http://{address}/healthz") == (200, "ok\n")
    status, metrics = fetch(f"http://{address}/metrics")
    assert status == 200 and "tpufleet_bridge_ready 1\n" in metrics
    assert fetch(f"http://{address}/other")[0] == 404
    bridge.send_signal(signal.SIGTERM)
    assert bridge.wait(900) == 0
    harness.bridges.remove(bridge)
