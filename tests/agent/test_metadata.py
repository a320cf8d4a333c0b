"""The agent and the metadata server of its machine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from tpufleet.agent import metadata, settings
from tpufleet.errors import BadInput
from tpufleet.model.hosts import NoticeKind
from tpufleet.testbed.cloud_tpu.metadata_server import MetadataServer, instance_values


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


def test_a_host_learns_from_its_machine_who_it_is(server, tmp_path):
    describe(server, "a", ["a"])
    given = settings.from_environ(metadata.complete_environ(environ(server, "a", 2, tmp_path)))
    assert given.host_id == "a/2" and given.num_hosts == 4 and given.chips == 4
    assert given.server == "http://10.0.0.1:8470" and given.address == "10.0.0.7"
    assert (given.bootstrap_token, given.token) == ("token of a", ""), (
        "a word, to get the token for"
    )
    assert "token of a" not in repr(given)


def test_a_node_of_a_gang_is_the_slice_at_its_number(server, tmp_path):
    describe(server, "gang-1", ["red", "green", "blue"])
    found = metadata.complete_environ(environ(server, "gang-1", 0, tmp_path))
    assert found["TPUFLEET_SLICE"] == "green"
    assert settings.from_environ(found).bootstrap_token == "token of green"


def test_a_machine_without_a_word_for_its_slice_is_refused_in_words(server, tmp_path):
    describe(server, "a", ["a"], tpufleet_tokens='{"b": "token of b"}')
    with pytest.raises(BadInput, match="no word for slice a"):
        metadata.complete_environ(environ(server, "a", 0, tmp_path))


@pytest.mark.parametrize("spoilt", ["", "null", "[1]", "{", '{"a": 1}'])
def test_spoilt_metadata_is_refused_in_words(server, tmp_path, spoilt):
    describe(server, "a", ["a"], tpufleet_slices=spoilt)
    with pytest.raises(BadInput):
        metadata.complete_environ(environ(server, "a", 0, tmp_path))


@pytest.mark.parametrize("spoilt", ["null", "[1]", "{"])
def test_words_that_cannot_be_read_are_told_of(server, tmp_path, spoilt):
    describe(server, "a", ["a"], tpufleet_tokens=spoilt)
    with pytest.raises(BadInput, match="tpufleet-tokens"):
        metadata.complete_environ(environ(server, "a", 0, tmp_path))


def test_without_a_metadata_server_the_agent_says_so(tmp_path):
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
def test_a_notice_is_seen_at_once_and_told_once(server, path, value, kind):
    describe(server, "a", ["a"])
    seen: SimpleQueue[tuple[NoticeKind, float]] = SimpleQueue()
    ended = threading.Event()
    watcher = metadata.MetadataNoticeWatcher(metadata.MetadataClient(f"{server.url}/a/0"))
    watching = threading.Thread(
        target=watcher.watch,
        args=(lambda kind: seen.put((kind, time.monotonic())), ended),
        daemon=True,
    )
    watching.start()
    begun = time.monotonic()
    server.set_value("a", path, value)
    found, at = seen.get(timeout=60)
    assert found is kind and at - begun < 10  # not by the timeout of a request
    server.set_value("a", "attributes/other", "x")
    ended.set()
    server.set_value("a", "preempted", "FALSE ")
    server.set_value("a", "maintenance-event", "NONE ")
    watching.join(timeout=60)
    assert not watching.is_alive() and seen.empty()


def test_a_watcher_outlives_a_metadata_server_that_stumbles():
    first = MetadataServer()
    describe(first, "a", ["a"])
    port = int(first.url.rpartition(":")[2])
    seen: SimpleQueue[NoticeKind] = SimpleQueue()
    ended = threading.Event()
    watcher = metadata.MetadataNoticeWatcher(metadata.MetadataClient(f"{first.url}/a/0"))
    threading.Thread(target=watcher.watch, args=(seen.put, ended), daemon=True).start()
    first.close()
    second = MetadataServer(("127.0.0.1", port))
    describe(second, "a", ["a"])
    second.set_value("a", "preempted", "TRUE")
    assert seen.get(timeout=60) is NoticeKind.PREEMPTED
    ended.set()
    second.close()


def test_only_who_says_the_word_is_answered(server):
    import urllib.error
    import urllib.request

    describe(server, "a", ["a"])
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{server.url}/a/0{metadata.METADATA_ROOT}preempted")
