"""Heartbeats that a server cannot read: of an agent with another protocol, or of nobody."""

from __future__ import annotations

import json

import pytest

from tests.polling import wait_until
from tpufleet.client.agents import AgentClient, UnreadableHeartbeat
from tpufleet.errors import Unauthorized
from tpufleet.model.fleet.agent_protocol import PROTOCOL
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.values.encoding import to_json

OTHER = PROTOCOL + 1
UNREADABLE = {
    "no fields": {},
    "unknown phase": {"phase": "uploading"},
    "unknown notice": {"notice": "defragmentation"},
    "a text for a number": {"coordinator_port": "many"},
    "no date": {"at": "yesterday"},
    "another form": {"environment": 7},
}


@pytest.fixture
def there(service):
    service.submit("job-1")
    service.add_slice("s1", "job-1")
    return service


def post(service, body: bytes, token: str | None = None):
    with service.http(service.slice_token("s1") if token is None else token) as http:
        return http.post("/agent/heartbeat", content=body)


def heartbeat(service, **changes) -> bytes:
    document = json.loads(to_json(service.make_heartbeat("s1/0")))
    return json.dumps({**document, "protocol": OTHER, **changes}).encode()


def unreadable(service, changes) -> bytes:
    if changes:
        return heartbeat(service, **changes)
    return json.dumps({"host_id": "s1/0", "protocol": OTHER}).encode()


def test_fields_of_another_release_are_ignored(there):
    assert post(there, heartbeat(there, not_yet_known={"deep": [1]})).status_code == 200


@pytest.mark.parametrize("changes", UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_heartbeat_is_refused_with_both_protocols_and_counts_as_life(there, changes):
    answer = post(there, unreadable(there, changes))
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert f"agent protocol {OTHER}, server protocol {PROTOCOL}" in message
    wait_until(lambda: there.store.last_heartbeats([HostId("s1/0")]))


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[]", b'{"host_id": 7}'])
def test_a_heartbeat_without_a_sender_has_no_valid_token(there, body):
    assert post(there, body).status_code == 401


def test_only_a_host_of_the_slice_is_believed(there):
    for changes in UNREADABLE.values():
        body = unreadable(there, changes)
        assert post(there, body, token=there.slice_token("s2")).status_code == 401
        assert post(there, body, token="tpf_wrong").status_code == 401
    there.send_heartbeat("s1/1")
    wait_until(lambda: there.store.last_heartbeats([HostId("s1/1")]))
    assert there.store.last_heartbeats([HostId("s1/0")]) == {}


def test_the_client_tells_an_unreadable_heartbeat_from_a_rejected_one(there):
    report = there.make_heartbeat("s1/0", coordinator_port="many")
    client = AgentClient(there.url, there.slice_token("s1"))
    with pytest.raises(UnreadableHeartbeat, match="coordinator_port"):
        client.send_heartbeat(report)
    client.close()
    client = AgentClient(there.url, there.slice_token("s2"))
    with pytest.raises(Unauthorized):
        client.send_heartbeat(report)
    client.close()
