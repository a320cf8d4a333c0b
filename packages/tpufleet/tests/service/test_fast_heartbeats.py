"""Heartbeats are answered without the routes, and everything else as before, on one connection."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from functools import partial

import pytest

from tests.polling import wait_until
from tests.service.harness import ServiceHarness
from tests.service.test_connection_limits import is_closed, limited
from tpufleet.client.agents import AgentClient
from tpufleet.model.fleet.agent_protocol import HeartbeatReply
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.values.encoding import from_json, to_json
from tpufleet.service.transport.client_connections import HeartbeatRequest, Parsed, parse_heartbeat

PLAIN = (
    b"POST /api/v1/agent/beat HTTP/1.1\r\nHost: fleet\r\nAuthorization: Bearer abc\r\n"
    b"Content-Length: 2\r\n\r\n{}"
)


def with_header(line: bytes) -> bytes:
    return PLAIN.replace(b"Host: fleet\r\n", b"Host: fleet\r\n" + line + b"\r\n")


def test_a_plain_heartbeat_is_recognised_whatever_the_size_of_its_parts():
    assert parse_heartbeat(PLAIN) == HeartbeatRequest("abc", b"{}")
    assert parse_heartbeat(with_header(b"Connection: keep-alive")) == HeartbeatRequest("abc", b"{}")
    for end in range(len(PLAIN)):
        assert parse_heartbeat(PLAIN[:end]) is Parsed.INCOMPLETE


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        PLAIN.replace(b"POST", b"PUT"),
        PLAIN.replace(b"/beat", b"/beat?x=1"),
        PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"),
        PLAIN.replace(b"Host: fleet\r\n", b""),
        PLAIN.replace(b"Bearer", b"Basic"),
        PLAIN.replace(b"Content-Length: 2", b"Content-Length: -2"),
        PLAIN.replace(b"Content-Length: 2", b"Content-Length: 2, 2"),
        PLAIN.replace(b"Content-Length: 2", b"Content-Length: 99999999999999999999"),
        with_header(b"Content-Length: 2"),
        with_header(b"Transfer-Encoding: chunked"),
        with_header(b"Content-Encoding: gzip"),
        with_header(b"Expect: 100-continue"),
        with_header(b"Upgrade: h2c"),
        with_header(b"Connection: close"),
        with_header(b"No colon"),
        with_header(b" folded: line"),
        with_header(b"Space : before the colon"),
        with_header(b"X-Zero: \0"),
        with_header(b"X-Feed: a\nContent-Length: 5"),
        with_header("X-Latin: é".encode()),
        with_header(b"X-Long: " + b"x" * 5000),
        PLAIN + b"GET / HTTP/1.1\r\n",
    ],
    ids=lambda data: repr(data[:70]),
)
def test_whatever_is_unusual_is_left_to_the_http_parser(data):
    assert parse_heartbeat(data) is Parsed.OTHER


@pytest.fixture
def there(service: ServiceHarness) -> ServiceHarness:
    service.submit("job-1")
    service.add_slice("s1", "job-1")
    service.add_attempt("job-1", 0, "s1")
    return service


def head(service: ServiceHarness, body: bytes, **headers: str) -> bytes:
    lines = {
        "Host": "fleet",
        "Authorization": f"Bearer {service.slice_token('s1')}",
        "Content-Length": str(len(body)),
        **headers,
    }
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST /api/v1/agent/beat HTTP/1.1\r\n{text}\r\n".encode()


def read_response(file) -> tuple[int, dict[str, str], bytes]:
    status = int(file.readline().split()[1])
    headers = {}
    while line := file.readline().strip():
        name, _, value = line.decode().partition(": ")
        headers[name.lower()] = value
    return status, headers, file.read(int(headers["content-length"]))


@contextlib.contextmanager
def connected(service: ServiceHarness) -> Iterator[tuple[socket.socket, object]]:
    with (
        socket.create_connection(("127.0.0.1", service.port), timeout=20) as connection,
        connection.makefile("rb") as file,
    ):
        yield connection, file


def test_the_reply_is_that_of_the_route(there):
    """The route answers a request that is sent in another form."""
    body = to_json(there.make_heartbeat("s1/2"))
    with there.http(there.slice_token("s1")) as http:
        fast = http.post("/agent/beat", content=body)
        slow = http.post("/agent/beat", content=iter([body]))  # chunked
    assert fast.status_code == slow.status_code == 200
    assert json.loads(fast.content) == json.loads(slow.content)
    assert fast.headers["content-type"] == slow.headers["content-type"]
    assert from_json(fast.content, HeartbeatReply).assignment.process_id == 2


@pytest.mark.parametrize(
    ("token", "body", "status"),
    [("wrong", None, 401), (None, b"{", 401), (None, b'{"host_id": "s1/0"}', 400)],
    ids=["invalid token", "not JSON", "unreadable"],
)
def test_errors_are_those_of_the_route(there, token, body, status):
    body = to_json(there.make_heartbeat("s1/0")) if body is None else body
    with there.http(token or there.slice_token("s1")) as http:
        fast = http.post("/agent/beat", content=body)
        slow = http.post("/agent/beat", content=iter([body]))
    assert fast.status_code == slow.status_code == status
    assert fast.json() == slow.json()


def test_a_host_that_does_not_exist_is_answered_like_by_the_route(there):
    body = to_json(there.make_heartbeat("s1/9"))
    with there.http(there.slice_token("s1")) as http:
        fast = http.post("/agent/beat", content=body)
        slow = http.post("/agent/beat", content=iter([body]))
    assert fast.status_code == slow.status_code == 400
    assert fast.json() == slow.json() and fast.json()["error"]["kind"] == "BadInput"


def test_one_connection_carries_heartbeats_and_other_requests(there):
    body = to_json(there.make_heartbeat("s1/0"))
    log = b"POST /api/v1/agent/logs?attempt=job-1.0&host=s1/0&offset=0 HTTP/1.1\r\nHost: fleet\r\n"
    log += f"Authorization: Bearer {there.slice_token('s1')}\r\n".encode()
    log += b"Content-Length: 2\r\n\r\nhi"
    with connected(there) as (connection, file):
        for _ in range(3):
            connection.sendall(head(there, body) + body)
            status, headers, content = read_response(file)
            assert status == 200 and "connection" not in headers
            assert from_json(content, HeartbeatReply).assignment.attempt_id == "job-1.0"
            connection.sendall(log)
            assert read_response(file)[0] == 200


def test_requests_that_are_sent_at_once_are_answered_in_order(there):
    body = to_json(there.make_heartbeat("s1/0"))
    unknown = b"GET /api/v1/nothing HTTP/1.1\r\nHost: fleet\r\n\r\n"
    with connected(there) as (connection, file):
        connection.sendall(head(there, body) + body)
        connection.sendall(head(there, body) + body + unknown)
        assert [read_response(file)[0] for _ in range(3)] == [200, 200, 401]


def test_a_heartbeat_in_many_parts_is_answered(there):
    body = to_json(there.make_heartbeat("s1/0"))
    with connected(there) as (connection, file):
        for part in (b"POST /api", b"/v1/agent", *[head(there, body)[18:]], body[:9], body[9:]):
            connection.sendall(part)
        assert read_response(file)[0] == 200


def test_agents_are_asked_to_connect_again_when_too_many_connections_rest(service):
    limited(service, connections=8)  # 6 may rest
    service.add_slice("s1", None)
    body = to_json(service.make_heartbeat("s1/0"))
    with contextlib.ExitStack() as stack:
        kept = []
        for _ in range(8):
            connection, file = stack.enter_context(connected(service))
            connection.sendall(head(service, body) + body)
            status, headers, _ = read_response(file)
            assert status == 200
            kept.append(headers.get("connection") != "close")
            if not kept[-1]:
                wait_until(partial(is_closed, connection))
        assert kept == [True] * 6 + [False] * 2


def test_a_connection_that_rests_too_long_is_closed(service):
    limited(service, idle_seconds=0.2)
    service.add_slice("s1", None)
    body = to_json(service.make_heartbeat("s1/0"))
    with connected(service) as (connection, file):
        connection.sendall(head(service, body) + body)
        assert read_response(file)[0] == 200
        wait_until(lambda: is_closed(connection))


def test_the_agent_keeps_its_connection_between_heartbeats(there):
    client = AgentClient(there.url, there.slice_token("s1"))
    heartbeat = there.make_heartbeat("s1/0")
    try:
        client.send_heartbeat(heartbeat)
        first = connections(there)
        for _ in range(3):
            client.send_log("job-1.0", HostId("s1/0"), 0, b"")
            client.send_heartbeat(heartbeat)
        assert connections(there) == first == 1
    finally:
        client.close()


def connections(service: ServiceHarness) -> int:
    return len(service.server.server_state.connections)


def test_a_stop_waits_for_no_connection_that_rests(there):
    body = to_json(there.make_heartbeat("s1/0"))
    with connected(there) as (connection, file):
        connection.sendall(head(there, body) + body)
        assert read_response(file)[0] == 200
        assert there.stop() < 5
        assert is_closed(connection)
        there.start()


def test_heartbeats_are_counted_in_the_metrics(there):
    there.send_heartbeat("s1/0")
    with there.http(there.tokens["ada"]) as http:
        text = http.get("/metrics").text
    assert 'tpufleet_http_requests_total{operation="heartbeat",status="200"} 1.0' in text
