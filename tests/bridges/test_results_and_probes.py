"""Results too large for a document, in a bucket on a real storage server; what is dropped after a
while; and what those who look after a bridge are told."""

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
from tests.bridges.harness import BridgeHarness
from tests.server_process import wait_until
from tpufleet.bridges.firestore import large_results
from tpufleet.errors import NotFound
from tpufleet.model.jobs import JobId
from tpufleet.testbed.kubernetes import cluster_layout


@pytest.fixture(scope="module")
def storage_url():
    with servers.server() as url:
        yield url


@pytest.fixture
def bucket(storage_url, monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", storage_url)
    return storage.Client().create_bucket(f"results-{uuid.uuid4().hex[:12]}")


def test_a_bucket_keeps_the_first_text_of_a_job_and_drops_it_when_told(bucket):
    place = large_results.result_store(f"gs://{bucket.name}/some/folder", lambda job_id: "")
    url = place.put(JobId("fs-1"), "é" * 3)
    assert url == f"gs://{bucket.name}/some/folder/fs-1.txt"
    assert place.put(JobId("fs-1"), "other") == url
    blob = bucket.blob("some/folder/fs-1.txt")
    assert blob.download_as_text() == "é" * 3
    place.delete(JobId("fs-1"))
    place.delete(JobId("fs-1"))
    assert not blob.exists()


def test_a_large_result_goes_to_the_bucket_and_with_its_code_when_its_time_is_over(
    world: BridgeHarness, bucket
):
    place = f"gs://{bucket.name}/out"
    first = world.start_bridge("--results", place)
    name = world.add("result = 'x' * 2_000_000")
    found = world.wait_ended(name)
    job = found["bridge"]["job"]
    assert found["result_url"] == f"{place}/{job}.txt"
    blob = bucket.blob(f"out/{job}.txt")
    assert blob.download_as_text() == "x" * 2_000_000
    client = world.server.client
    digest = client.job(job).job.snapshot
    assert client.has_snapshot(digest) and client.result(job)
    first.terminate()
    assert first.wait(60) == 0
    world.bridges.remove(first)

    ended = found["completed_at"].timestamp()
    wait_until(lambda: time.time() > ended + 1.5, 10, world.diagnostics)
    world.start_bridge("--results", place, "--keep", "1s")
    wait_until(lambda: not blob.exists(), 60, world.diagnostics)
    wait_until(lambda: not client.has_snapshot(digest), 60, world.diagnostics)
    with pytest.raises(NotFound):
        client.result(job)
    wait_until(lambda: "result_url" not in world.get(name), 60, world.diagnostics)
    assert world.get(name)["status"] == "completed"


def asked(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def test_a_bridge_says_when_it_is_ready_and_when_it_is_not(world: BridgeHarness):
    address = f"127.0.0.1:{cluster_layout.free_ports(1)[0]}"
    bridge = world.start_bridge("--probes", address, "--beat", "0.5")
    wait_until(lambda: asked(f"http://{address}/readyz") == (200, "ok\n"), 60, world.diagnostics)
    assert asked(f"http://{address}/healthz") == (200, "ok\n")
    assert asked(f"http://{address}/other")[0] == 404
    bridge.send_signal(signal.SIGTERM)
    assert bridge.wait(60) == 0
    world.bridges.remove(bridge)
