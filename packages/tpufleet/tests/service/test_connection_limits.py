"""Clients that are slow, many, or have no token do not keep the server from its work."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from tests.polling import wait_until
from tests.server_process import Server
from tests.service.harness import SECRET
from tpufleet.client.agents import HEARTBEAT_TIMEOUT
from tpufleet.model.fleet.agent_protocol import Heartbeat, HeartbeatReply
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.values.encoding import from_json, to_json
from tpufleet.policy.accounting import rate_limits
from tpufleet.policy.accounting.rate_limits import RateLimit
from tpufleet.service.transport import auth, routing
from tpufleet.service.transport.http_server import make_server
from tpufleet.service.transport.limits import RateLimiter, TooManyRequests

SLOW_CONNECTIONS = 500
HALF_A_HEADER = b"POST /api/v1/agent/heartbeat HTTP/1.1\r\nHost: fleet\r\nX-Slow: "
HALF_A_BODY = HALF_A_HEADER + b"1\r\nContent-Length: 1000\r\nAuthorization: Bearer x\r\n\r\n{"
GARBAGE = b"\x16\x03\x01 not http\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the default limit of file descriptors of most systems."""
    server = Server(tmp_path_factory.mktemp("home"), descriptors=1024)
    server.start()
    yield server
    server.cleanup()


def beat(http: httpx.Client, home: Path) -> float:
    """Send a heartbeat as an agent; returns how many seconds the reply took."""
    secret = (home / "secret").read_text().strip().encode()
    heartbeat = Heartbeat(
        host_id=HostId("s1/0"), boot="b", at=datetime.now(UTC), address="10.0.0.1",
        coordinator_port=8476,
    )  # fmt: skip
    started = time.monotonic()
    reply = http.post(
        "/api/v1/agent/heartbeat",
        content=to_json(heartbeat),
        headers={"Authorization": f"Bearer {auth.slice_token(secret, SliceId('s1'))}"},
    )
    assert reply.status_code == 200, reply.text
    assert from_json(reply.content, HeartbeatReply).release  # no such slice: authenticated
    return time.monotonic() - started


@pytest.mark.parametrize(
    "sent", [b"", HALF_A_HEADER, HALF_A_BODY, GARBAGE], ids=["silent", "header", "body", "garbage"]
)
def test_heartbeats_are_answered_while_many_connections_are_slow(server, sent):
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    log = server.home / "server.log"
    size = log.stat().st_size
    with ExitStack() as stack:
        kept = stack.enter_context(
            httpx.Client(base_url=server.url, verify=False, trust_env=False, timeout=900)
        )
        waits = [beat(kept, server.home)]
        slow: list[socket.socket] = []
        while len(slow) < SLOW_CONNECTIONS:
            slow += [stack.enter_context(socket.create_connection(address)) for _ in range(100)]
            for each in slow:
                try:
                    each.sendall(sent)
                except (BrokenPipeError, ConnectionResetError):
                    continue  # closed by the server, as it should be
            waits.append(beat(kept, server.home))
            with httpx.Client(
                base_url=server.url, verify=False, trust_env=False, timeout=900
            ) as fresh:
                waits.append(beat(fresh, server.home))
    assert max(waits) < HEARTBEAT_TIMEOUT.read, waits  # after which an agent gives up
    assert log.stat().st_size - size < 1_000_000


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(4096) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_client_that_does_not_finish_its_body_is_disconnected(service, monkeypatch):
    monkeypatch.setattr(routing, "BODY_GRACE_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(HALF_A_BODY)
        assert b" 408 " in connection.recv(4096)
        wait_until(lambda: is_closed(connection))


def test_a_slow_upload_that_makes_progress_is_not_disconnected(service, monkeypatch):
    """It takes longer than the grace time. Each part allows for a machine that stands still."""
    monkeypatch.setattr(routing, "BODY_GRACE_SECONDS", 2.0)
    monkeypatch.setattr(routing, "BODY_BYTES_PER_SECOND", 1)

    def chunks() -> Iterator[bytes]:
        for _ in range(10):
            yield b'{"jobs": '
            time.sleep(0.3)  # a slow network, not a wait for something

    with service.http(service.tokens["mel"]) as http:
        assert http.post("/jobs", content=chunks(), timeout=900).status_code == 400


def test_clients_beyond_the_number_of_connections_get_503_until_others_leave(service):
    service.stop()
    service.start(make_server=lambda app: make_server(app, max_connections=10))
    with service.http(service.tokens["mel"]) as http:
        with ExitStack() as stack:
            for _ in range(12):
                stack.enter_context(socket.create_connection(("127.0.0.1", service.port)))
            wait_until(lambda: http.get("/me").status_code == 503)
        wait_until(lambda: http.get("/me").status_code == 200)


def test_too_many_invalid_tokens_are_rejected_without_looking_them_up(service):
    service.stop()
    now = datetime(2026, 1, 1, tzinfo=UTC)
    service.start(limiter=RateLimiter(lambda: now))
    mel = service.client("mel")
    mel.me()
    with service.http("tpf_wrong") as http:
        for _ in range(rate_limits.PER_STRANGER.burst):
            assert http.get("/me").status_code == 401
        answer = http.get("/me")
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
    assert mel.me().name == "mel"  # from the same address


def test_all_tokens_of_a_user_share_one_limit(service):
    """A user may have a hundred tokens, sessions and any number of links and jobs."""
    service.submit("job-1", by="mel")
    service.add_slice("slice-1", "job-1")
    service.add_attempt("job-1", 0, "slice-1")
    second = service.client("mel").create_token().token
    service.stop()
    now = datetime(2026, 1, 1, tzinfo=UTC)
    limiter = RateLimiter(lambda: now)
    for _ in range(rate_limits.PER_USER.burst - 1):
        limiter.check_caller("user:mel", rate_limits.PER_USER)
    service.start(limiter=limiter)
    with service.http(service.tokens["mel"]) as first, service.http(second) as other:
        assert first.get("/me").status_code == 200
        assert other.get("/me").status_code == first.get("/me").status_code == 429
    assert service.client("mo").me().name == "mo"
    with service.http(auth.job_token(SECRET, AttemptId("job-1.0"))) as process:
        assert process.get("/me").status_code == 200, "jobs of a user have a limit of their own"
        for _ in range(rate_limits.PER_USER.burst - 1):
            limiter.check_caller("jobs:mel", rate_limits.PER_USER)
        assert process.get("/me").status_code == 429


WITHOUT_A_TOKEN = {
    "no header": ("/me", {}),
    "another scheme": ("/me", {"Authorization": "Basic bWVsOm1lbA=="}),
    "empty token": ("/me", {"Authorization": "Bearer"}),
    "unknown token": ("/me", {"Authorization": "Bearer tpf_wrong"}),
    "unknown path": ("/nothing/here", {}),
    "forged session": ("/me", {"Cookie": "tpufleet_session=forged"}),
    "forged link": ("/jobs/job-1/logs?user=mel&expires=1&signature=forged", {}),
    "agent without a token": ("/agent/snapshots/abc", {}),
}


@pytest.mark.parametrize(("path", "headers"), WITHOUT_A_TOKEN.values(), ids=WITHOUT_A_TOKEN)
def test_requests_without_a_valid_token_are_limited_per_address(service, path, headers):
    service.stop()
    now = datetime(2026, 1, 1, tzinfo=UTC)
    limiter = RateLimiter(lambda: now)
    for _ in range(rate_limits.PER_STRANGER.burst - 1):
        limiter.reject("127.0.0.1", "earlier requests")
    service.start(limiter=limiter)
    with service.http() as http:
        assert http.get(path, headers=headers).status_code == 401
        assert http.get(path, headers=headers).status_code == 429


def test_a_bucket_refills_over_time():
    limit, now = RateLimit(per_second=2, burst=3), datetime(2026, 1, 1, tzinfo=UTC)
    bucket, wait = None, None
    for _ in range(3):
        bucket, wait = rate_limits.take(bucket, limit, now)
        assert wait is None
    bucket, wait = rate_limits.take(bucket, limit, now)
    assert wait == timedelta(seconds=0.5)
    bucket, wait = rate_limits.take(bucket, limit, now + timedelta(seconds=0.5))
    assert wait is None
    bucket, wait = rate_limits.take(bucket, limit, now - timedelta(hours=1))  # the clock went back
    assert wait is not None


def test_a_caller_beyond_its_limit_waits_and_others_do_not():
    now = datetime(2026, 1, 1, tzinfo=UTC)
    limiter = RateLimiter(lambda: now)
    limit = RateLimit(per_second=1, burst=2)
    for _ in range(2):
        limiter.check_caller("a", limit)
    with pytest.raises(TooManyRequests, match="retry in 1 s"):
        limiter.check_caller("a", limit)
    limiter.check_caller("b", limit)
