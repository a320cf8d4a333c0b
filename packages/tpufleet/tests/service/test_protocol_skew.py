"""Agents and servers that are one release apart. The fixtures are messages of the previous
protocol, as its programs sent them."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from tests.polling import wait_until
from tpufleet.client.agents import AgentClient, UnreadableHeartbeat
from tpufleet.errors import BadInput, Unauthorized
from tpufleet.model.fleet.agent_protocol import (
    HOST_HEADER,
    PROTOCOL,
    Heartbeat,
    HeartbeatReply,
    read_heartbeat,
    read_reply,
)
from tpufleet.model.fleet.hosts import HostId, NoticeKind, Phase
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.values.encoding import to_json

FIXTURES = Path(__file__).parent / "protocol"
OLD_HEARTBEAT = (FIXTURES / "heartbeat_1.json").read_bytes()
OLD_REPLY = (FIXTURES / "reply_1.json").read_bytes()


def newer(old: bytes, **changes) -> bytes:
    """A message of the next release: fields and values that this one has never seen."""
    document = json.loads(old)
    document.update({"protocol": PROTOCOL + 1, "not_yet_known": {"deep": [1]}, **changes})
    return json.dumps(document).encode()


def has_all_of(new: object, old: object) -> bool:
    """Every field of the old message with its value, at any depth."""
    if isinstance(new, dict) and isinstance(old, dict):
        return all(name in new and has_all_of(new[name], old[name]) for name in old)
    if isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        return all(map(has_all_of, new, old))
    return new == old


@pytest.fixture
def there(service):
    service.submit("job-1")
    service.add_slice("s1", "job-1")
    return service


def post(service, body: bytes, token: str | None = None, host: str | None = "s1/0"):
    headers = {} if host is None else {HOST_HEADER: host}
    with service.http(service.slice_token("s1") if token is None else token) as http:
        return http.post("/agent/beat", content=body, headers=headers)


@pytest.mark.parametrize("header", [None, "s1/0"], ids=["old agent", "new agent"])
def test_the_heartbeat_of_the_previous_release_is_read(there, header):
    answer = post(there, OLD_HEARTBEAT, host=header)
    assert answer.status_code == 200, answer.text
    (message,) = [each for each in there.store.inbox() if each.heartbeat]
    assert message.heartbeat.exit.evidence is EndReason.OUT_OF_HBM
    assert message.heartbeat.seq == 0 and message.heartbeat.protocol == 1


def test_the_previous_release_reads_the_messages_of_this_one():
    """It ignores unknown fields, and needs every field that it knows."""
    for old, kind, read in (
        (OLD_HEARTBEAT, Heartbeat, read_heartbeat),
        (OLD_REPLY, HeartbeatReply, read_reply),
    ):
        now = json.loads(to_json(read(old)))
        assert has_all_of(now, json.loads(old)), kind


def test_the_heartbeat_of_the_next_release_is_read(there):
    document = json.loads(OLD_HEARTBEAT)
    exit = {**document["exit"], "evidence": "cosmic_ray", "cause": "x"}
    body = newer(OLD_HEARTBEAT, phase="uploading", notice="defragmentation", exit=exit)
    assert post(there, body).status_code == 200
    heartbeat = read_heartbeat(body)
    assert heartbeat.phase is Phase.RUNNING
    assert heartbeat.notice is NoticeKind.MAINTENANCE
    assert heartbeat.exit is not None and heartbeat.exit.evidence is None
    assert heartbeat.exit.status == 1


def test_the_reply_of_the_next_release_is_read():
    document = json.loads(OLD_REPLY)
    command = document["host_commands"][0]
    reply = read_reply(
        newer(
            OLD_REPLY,
            assignment={**document["assignment"], "stop": "rebalanced", "topology": "4x4"},
            host_commands=[{**command, "id": "c2", "kind": "reboot"}, command],
        )
    )
    assert reply.assignment is not None
    assert reply.assignment.stop is EndReason.CANCELLED, "an unknown reason still stops it"
    assert [each.id for each in reply.host_commands] == ["c1"], "an unknown command is not run"
    assert reply.lease == timedelta(minutes=10)


UNREADABLE = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[]",
    b'{"host_id": 7}',
    b'{"host_id": "s1/0"}',
    newer(OLD_HEARTBEAT, at="yesterday"),
    newer(OLD_HEARTBEAT, at="10000-01-01T00:00:00Z"),
    newer(OLD_HEARTBEAT, coordinator_port="many"),
    newer(OLD_HEARTBEAT, environment=7),
    newer(OLD_HEARTBEAT, exit=[]),
    newer(OLD_HEARTBEAT, phase={"a": 1}),
]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(body, marks=() if number % 4 == 0 else pytest.mark.slow)
        for number, body in enumerate(UNREADABLE)
    ],
)
def test_an_unreadable_heartbeat_is_answered_with_a_reason_and_counts_as_life(there, body):
    answer = post(there, body)
    assert answer.status_code == 400, answer.text
    assert "unreadable heartbeat of s1/0" in answer.json()["error"]["message"]
    wait_until(lambda: there.store.last_heartbeats([HostId("s1/0")]))


def test_only_a_host_of_the_slice_is_believed(there):
    for body in (*UNREADABLE, OLD_HEARTBEAT):
        assert post(there, body, token=there.slice_token("s2")).status_code == 401, body
        assert post(there, body, token="tpf_wrong").status_code == 401, body
    there.send_heartbeat("s1/1")
    wait_until(lambda: there.store.last_heartbeats([HostId("s1/1")]))
    assert there.store.last_heartbeats([HostId("s1/0")]) == {}


def test_the_header_cannot_speak_for_another_host(there):
    there.add_slice("s2", None)
    answer = post(there, OLD_HEARTBEAT, token=there.slice_token("s2"), host="s2/0")
    assert answer.status_code == 401


def test_the_client_tells_an_unreadable_heartbeat_from_a_rejected_one(there):
    heartbeat = read_heartbeat(newer(OLD_HEARTBEAT, coordinator_port=1))
    unreadable = Heartbeat(
        **{
            **{name: getattr(heartbeat, name) for name in Heartbeat.__slots__},
            "coordinator_port": "many",
        }
    )
    client = AgentClient(there.url, there.slice_token("s1"))
    with pytest.raises(UnreadableHeartbeat, match="coordinator_port"):
        client.send_heartbeat(unreadable)
    client.close()
    client = AgentClient(there.url, there.slice_token("s2"))
    with pytest.raises(Unauthorized):
        client.send_heartbeat(unreadable)
    client.close()


def test_what_is_missing_is_never_guessed():
    with pytest.raises(BadInput):
        read_heartbeat(b'{"host_id": "s1/0"}')
