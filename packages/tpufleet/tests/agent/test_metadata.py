"""The agent and the instance metadata server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from tpufleet.agent import metadata, notices, settings
from tpufleet.errors import BadInput
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet_testbed.cloud_tpu.metadata_server import MetadataServer, instance_values


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    served = MetadataServer()
    yield served
    served.close()


def describe(server: MetadataServer, node: str, slices: list[str], **changes: str) -> None:
    attributes = {
        "tpufleet-server": "http://10.0.0.1:8470",
        "tpufleet-slices": json.dumps(slices),
        "tpufleet-tokens": json.dumps({name: f"token of {name}" for name in slices}),
        "tpufleet-hosts": "4",
        "tpufleet-chips": "4",
        "tpu-env": f"ZONE: 'us-central1-a'\nNODE_ID: '{node}'\n",
    }
    attributes |= {key.replace("_", "-"): value for key, value in changes.items()}
    server.put(node, instance_values(attributes) | {"network-interfaces/0/ip": "10.0.0.7"})


def environ(server: MetadataServer, node: str, host: int, folder: Path) -> dict[str, str]:
    return {
        "TPUFLEET_METADATA": f"{server.url}/{node}/{host}",
        "TPUFLEET_WORK": str(folder / "work"),
    }


def test_the_identity_of_a_host_is_read_from_metadata(server, tmp_path):
    describe(server, "a", ["a"])
    result = settings.from_environ(metadata.complete_environ(environ(server, "a", 2, tmp_path)))
    assert result.host_id == "a/2" and result.num_hosts == 4 and result.chips == 4
    assert result.server == "http://10.0.0.1:8470" and result.address == "10.0.0.7"
    assert (result.bootstrap_token, result.token) == ("token of a", ""), (
        "the bootstrap token, to be exchanged"
    )
    assert "token of a" not in repr(result)


@pytest.mark.parametrize(
    "told",
    [{"worker_id": "3"}, {"tpu_env": "ZONE: 'z'\nTPU_WORKER_ID: '3'\nTOPOLOGY: '2x2x2'\n"}],
    ids=["an attribute", "tpu-env"],
)
def test_compute_engine_tells_the_number_of_a_host_in_another_way(server, tmp_path, told):
    describe(server, "a", ["a"], **{"agent_worker_number": "", **told})
    completed = metadata.complete_environ(environ(server, "a", 0, tmp_path))
    assert completed["TPUFLEET_HOST_INDEX"] == "3"


def test_a_host_without_a_number_waits_for_its_slice_to_be_complete(server, tmp_path):
    describe(server, "a", ["a"], agent_worker_number="")
    with pytest.raises(BadInput, match="no worker-id yet"):
        metadata.complete_environ(environ(server, "a", 0, tmp_path))


def test_a_node_of_a_gang_serves_the_slice_at_its_index(server, tmp_path):
    describe(server, "gang-1", ["red", "green", "blue"])
    completed = metadata.complete_environ(environ(server, "gang-1", 0, tmp_path))
    assert completed["TPUFLEET_SLICE"] == "green"
    assert settings.from_environ(completed).bootstrap_token == "token of green"


def test_a_missing_bootstrap_token_is_an_error(server, tmp_path):
    describe(server, "a", ["a"], tpufleet_tokens='{"b": "token of b"}')
    with pytest.raises(BadInput, match="no bootstrap token for slice a"):
        metadata.complete_environ(environ(server, "a", 0, tmp_path))


@pytest.mark.parametrize("invalid", ["", "null", "[1]", "{", '{"a": 1}'])
def test_an_invalid_list_of_slices_is_an_error(server, tmp_path, invalid):
    describe(server, "a", ["a"], tpufleet_slices=invalid)
    with pytest.raises(BadInput):
        metadata.complete_environ(environ(server, "a", 0, tmp_path))


@pytest.mark.parametrize("invalid", ["null", "[1]", "{"])
def test_invalid_bootstrap_tokens_are_an_error(server, tmp_path, invalid):
    describe(server, "a", ["a"], tpufleet_tokens=invalid)
    with pytest.raises(BadInput, match="tpufleet-tokens"):
        metadata.complete_environ(environ(server, "a", 0, tmp_path))


def test_an_unreachable_metadata_server_is_an_error(tmp_path):
    with pytest.raises(BadInput, match="metadata server"):
        metadata.complete_environ({"TPUFLEET_METADATA": "http://127.0.0.1:9", "TPUFLEET_WORK": "x"})


@pytest.mark.parametrize(
    ("path", "value", "kind"),
    [
        ("preempted", "TRUE", NoticeKind.PREEMPTED),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", NoticeKind.MAINTENANCE),
        ("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE", NoticeKind.MAINTENANCE),
    ],
)
def test_a_notice_is_reported_immediately_and_once(server, path, value, kind):
    describe(server, "a", ["a"])
    seen: SimpleQueue[tuple[NoticeKind, float]] = SimpleQueue()
    ended = threading.Event()
    client = metadata.MetadataClient(f"{server.url}/a/0")
    watching = threading.Thread(
        target=notices.watch_metadata,
        args=(client, lambda kind: seen.put((kind, time.monotonic())), ended),
        daemon=True,
    )
    watching.start()
    started = time.monotonic()
    server.set_value("a", path, value)
    received, at = seen.get(timeout=900)
    assert received is kind and at - started < 10  # not after a request timed out
    server.set_value("a", "attributes/other", "x")
    ended.set()
    server.set_value("a", "preempted", "FALSE ")
    server.set_value("a", "maintenance-event", "NONE ")
    watching.join(timeout=900)
    assert not watching.is_alive() and seen.empty()


def test_the_watcher_survives_a_restart_of_the_metadata_server():
    first = MetadataServer()
    describe(first, "a", ["a"])
    port = int(first.url.rpartition(":")[2])
    seen: SimpleQueue[NoticeKind] = SimpleQueue()
    ended = threading.Event()
    client = metadata.MetadataClient(f"{first.url}/a/0")
    threading.Thread(
        target=notices.watch_metadata, args=(client, seen.put, ended), daemon=True
    ).start()
    first.close()
    second = MetadataServer(("127.0.0.1", port))
    describe(second, "a", ["a"])
    second.set_value("a", "preempted", "TRUE")
    assert seen.get(timeout=900) is NoticeKind.PREEMPTED
    ended.set()
    second.close()


def test_the_metadata_server_requires_the_flavor_header(server):
    import urllib.error
    import urllib.request

    describe(server, "a", ["a"])
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{server.url}/a/0{metadata.METADATA_ROOT}preempted")
