"""A refusal for too many requests is waited for, unless that takes long."""

from __future__ import annotations

import http.server
import io
import threading
from collections.abc import Iterator

import pytest

from tpufleet.client.transport import Transport
from tpufleet.errors import Unreachable


class RefusingServer(http.server.ThreadingHTTPServer):
    """Refuses the first requests, each with its number of seconds."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refusals: list[str] = []
        self.bodies: list[bytes] = []


class _Handler(http.server.BaseHTTPRequestHandler):
    server: RefusingServer

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        refused = self.server.refusals.pop(0) if self.server.refusals else None
        body = (
            b"{}" if refused is None else b'{"error": {"kind": "Unreachable", "message": "busy"}}'
        )
        self.send_response(200 if refused is None else 429)
        if refused is not None:
            self.send_header("Retry-After", refused)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the output belongs to the test."""


@pytest.fixture
def server() -> Iterator[RefusingServer]:
    with RefusingServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def transport(server: RefusingServer) -> Iterator[Transport]:
    transport = Transport(f"http://127.0.0.1:{server.server_port}", "token")
    yield transport
    transport.close()


def test_a_refused_request_is_sent_again_after_the_time_that_the_server_names(server, transport):
    server.refusals = ["0", "1"]
    assert transport.send("POST", "/jobs", body={"a": 1}).status_code == 200
    assert server.bodies == [b'{"a":1}'] * 3


def test_a_long_refusal_is_reported_at_once(server, transport):
    server.refusals = ["3600"]
    with pytest.raises(Unreachable):
        transport.send("POST", "/jobs", body={})
    assert len(server.bodies) == 1


def test_content_that_can_be_read_once_is_sent_once(server, transport):
    server.refusals = ["0"]
    with pytest.raises(Unreachable):
        transport.send("POST", "/jobs", content=iter([b"a"]))


def test_a_file_is_sent_again_from_its_beginning(server, transport):
    server.refusals = ["0"]
    assert transport.send("POST", "/jobs", content=io.BytesIO(b"code")).status_code == 200
    assert server.bodies == [b"code"] * 2
