"""An HTTP server for agent tests that can refuse, delay, stop and restart."""

from __future__ import annotations

import json
import threading
from collections import Counter
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tests.ports import free_port
from tpufleet.model.fleet.agent_protocol import (
    Assignment,
    Heartbeat,
    HeartbeatReply,
    SliceTokenReply,
    SliceTokenRequest,
)
from tpufleet.model.fleet.hosts import Phase
from tpufleet.model.values import encoding


class FakeControlPlane:
    token = "slice-token-3f9a"
    bootstrap_token = "bootstrap-token-77c1"

    def __init__(self) -> None:
        self.assignment: Assignment | None = None
        self.release = False
        self.next_heartbeat = timedelta(seconds=0.1)
        self.lease = timedelta(minutes=10)
        self.heartbeats: list[Heartbeat] = []
        self.results: dict[str, bytes] = {}
        self.exchanged_nonces: dict[str, str] = {}  # host → nonce
        self.phases_before_result: list[Phase] = []
        self.logs: dict[str, bytearray] = {}
        self.largest_chunk = 0
        self.snapshots: dict[str, bytes] = {}
        self.refused_routes: dict[str, int] = {}  # route → status
        self.delayed_routes: dict[str, threading.Event] = {}  # route → released when this is set
        self.hold_next_reply: threading.Event | None = None  # computed now, sent when this is set
        self.garbled_routes: set[str] = set()  # routes that answer with HTML
        self.held_requests: Counter[str] = Counter()  # requests being release_event, by route
        self.forget_log_after: int | None = None  # drop the log beyond this offset, once
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._port = free_port()  # nobody else gets it while this server is stopped
        self.listening = False
        self.restart()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def stop(self) -> None:
        """Close the port and drop open connections."""
        self.listening = False
        assert self._server
        self._server.shutdown()
        self._server.server_close()

    def restart(self) -> None:
        handler = type("Handler", (_Handler,), {"control_plane": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.listening = True
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def close(self) -> None:
        for release_event in self.delayed_routes.values():
            release_event.set()
        if self.listening:
            self.stop()

    def log(self, attempt: str) -> str:
        return self.logs.get(attempt, bytearray()).decode(errors="replace")

    def record_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        with self._lock:
            self.heartbeats.append(heartbeat)
            return HeartbeatReply(
                assignment=self.assignment,
                next_heartbeat=self.next_heartbeat,
                lease=self.lease,
                release=self.release,
            )

    def append_log(self, attempt: str, offset: int, data: bytes) -> tuple[int, int]:
        with self._lock:
            self.largest_chunk = max(self.largest_chunk, len(data))
            release_event = self.logs.setdefault(attempt, bytearray())
            if self.forget_log_after is not None and len(release_event) > self.forget_log_after:
                del release_event[self.forget_log_after :]
                self.forget_log_after = None
            if offset > len(release_event):
                return 409, len(release_event)
            release_event += data[len(release_event) - offset :]
            return 200, len(release_event)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    control_plane: FakeControlPlane

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        parts = urlsplit(self.path)
        if parts.path.endswith("/register"):
            self._exchange(encoding.from_json(body, SliceTokenRequest))
            return
        if not self._authorized(parts.path):
            return
        if parts.path.endswith("/heartbeat"):
            reply = self.control_plane.record_heartbeat(encoding.from_json(body, Heartbeat))
            release_event, self.control_plane.hold_next_reply = (
                self.control_plane.hold_next_reply,
                None,
            )
            if release_event is not None:
                self._hold("reply", release_event)
            self._answer(200, encoding.to_json(reply))
        elif parts.path.endswith("/results"):
            self.control_plane.results[parse_qs(parts.query)["attempt"][0]] = body
            self.control_plane.phases_before_result = [
                heartbeat.phase for heartbeat in self.control_plane.heartbeats
            ]
            self._answer(200, b'{"done": true}')
        else:
            query = parse_qs(parts.query)
            status, size = self.control_plane.append_log(
                query["attempt"][0], int(query["offset"][0]), body
            )
            self._answer(status, json.dumps({"size": size}).encode())

    def _exchange(self, request: SliceTokenRequest) -> None:
        """Like the real server: the first nonce of a host wins."""
        if self.headers["Authorization"] != f"Bearer {self.control_plane.bootstrap_token}":
            self._fail(401, "Unauthorized", "invalid bootstrap token")
        elif (
            self.control_plane.exchanged_nonces.setdefault(request.host_id, request.nonce)
            != request.nonce
        ):
            self._fail(403, "Forbidden", "another agent is registered for this host")
        else:
            self._answer(200, encoding.to_json(SliceTokenReply(token=self.control_plane.token)))

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not self._authorized(path):
            return
        archive = self.control_plane.snapshots.get(path.rpartition("/")[2])
        if archive is None:
            self._fail(404, "NotFound", "no such snapshot")
        else:
            self._answer(200, archive)

    def _authorized(self, path: str) -> bool:
        route = path.removeprefix("/api/v1/agent/").partition("/")[0]
        release_event = self.control_plane.delayed_routes.get(route)
        if release_event is not None:
            self._hold(route, release_event)
        if not self.control_plane.listening:
            self.close_connection = True
            return False
        if self.headers["Authorization"] != f"Bearer {self.control_plane.token}":
            self._fail(401, "Unauthorized", "no such token")
            return False
        if route in self.control_plane.refused_routes:
            status = self.control_plane.refused_routes[route]
            self._fail(status, "BadInput" if status == 400 else "Refused", "refused by the test")
            return False
        if route in self.control_plane.garbled_routes:
            self.control_plane.held_requests["garbled"] += 1
            self._answer(200, b"<html>please sign in to the network</html>")
            return False
        return True

    def _hold(self, route: str, release_event: threading.Event) -> None:
        self.control_plane.held_requests[route] += 1
        release_event.wait(900)
        self.control_plane.held_requests[route] -= 1

    def _fail(self, status: int, kind: str, message: str) -> None:
        error = {"error": {"kind": kind, "message": message}}
        self._answer(status, json.dumps(error).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
