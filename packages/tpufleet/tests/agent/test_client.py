"""AgentClient against an HTTP server: replies and translated errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tpufleet import errors
from tpufleet.client.agents import AgentClient
from tpufleet.model.fleet.agent_protocol import Heartbeat
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.job.attempts import AttemptId

BEAT = Heartbeat(
    host_id=HostId("s1/0"),
    boot="b",
    at=datetime(2026, 1, 1, tzinfo=UTC),
    address="a",
    coordinator_port=1,
)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, errors.Unauthorized), (403, errors.Forbidden), (404, errors.NotFound),
        (400, errors.BadInput), (408, errors.Unreachable), (429, errors.Unreachable),
        (500, errors.Unreachable), (502, errors.Unreachable),
    ],
)  # fmt: skip
def test_each_status_maps_to_a_temporary_or_permanent_error(control_plane, status, kind):
    control_plane.refused_routes["heartbeat"] = status
    with pytest.raises(kind, match="refused by the test"):
        AgentClient(control_plane.url, control_plane.token).send_heartbeat(BEAT)


def test_a_wrong_token_is_unauthorized(control_plane):
    with pytest.raises(errors.Unauthorized):
        AgentClient(control_plane.url, "wrong").send_heartbeat(BEAT)


def test_no_server_is_unreachable(control_plane):
    client = AgentClient(control_plane.url, control_plane.token)
    client.send_heartbeat(BEAT)
    control_plane.stop()
    with pytest.raises(errors.Unreachable):
        client.send_heartbeat(BEAT)


def test_a_gap_in_the_log_returns_the_size_on_the_server(control_plane):
    client = AgentClient(control_plane.url, control_plane.token)
    attempt, host = AttemptId("j.0"), HostId("s1/0")
    assert client.send_log(attempt, host, 0, b"abc") == 3
    assert client.send_log(attempt, host, 0, b"abcde") == 5
    assert client.send_log(attempt, host, 9, b"x") == 5
    assert control_plane.log("j.0") == "abcde"


def test_a_snapshot_is_downloaded_byte_for_byte(control_plane):
    control_plane.snapshots["d1"] = bytes(range(256)) * 1000
    assert (
        b"".join(AgentClient(control_plane.url, control_plane.token).snapshot("d1"))
        == control_plane.snapshots["d1"]
    )
    with pytest.raises(errors.NotFound):
        list(AgentClient(control_plane.url, control_plane.token).snapshot("other"))


@pytest.fixture
def other_server() -> Iterator[tuple[str, list[int]]]:
    """A proxy, a load balancer or another program at the address of the server. The list has
    the status of its next answer."""
    statuses = [404]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(statuses[0], "not here")

        def log_message(self, format: str, *args: object) -> None:
            """Not logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", statuses
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 407, 409])
def test_an_error_of_something_else_than_the_control_plane_is_retried(other_server, status):
    """A job must not end, nor a host give up, because a load balancer has no server for a while."""
    url, statuses = other_server
    statuses[0] = status
    client = AgentClient(url, "token")
    for call in (
        lambda: client.send_heartbeat(BEAT),
        lambda: client.register(BEAT.host_id, "nonce"),
    ):
        with pytest.raises(
            errors.Unreachable, match=f"{url} answered {status}.*not a tpufleet server"
        ):
            call()
    assert not client.reachable
