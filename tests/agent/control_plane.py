"""A small real control plane for tests: it can refuse, delay, vanish and come back."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tpufleet.model import encoding
from tpufleet.model.agent_protocol import (
    Assignment,
    Heartbeat,
    HeartbeatReply,
    SliceTokenReply,
    SliceTokenRequest,
)
from tpufleet.model.hosts import Phase


class FakeControlPlane:
    token = "slice-token-3f9a"
    word = "word-77c1"

    def __init__(self) -> None:
        self.assignment: Assignment | None = None
        self.release = False
        self.next_beat = timedelta(seconds=0.1)
        self.lease = timedelta(minutes=10)
        self.beats: list[Heartbeat] = []
        self.results: dict[str, bytes] = {}
        self.entered: dict[str, str] = {}  # host → nonce
        self.phases_before_result: list[Phase] = []
        self.logs: dict[str, bytearray] = {}
        self.largest_chunk = 0
        self.snapshots: dict[str, bytes] = {}
        self.refuse: dict[str, int] = {}  # route → status
        self.delay: dict[str, threading.Event] = {}  # route → answered only once this is set
        self.hold_next_reply: threading.Event | None = None  # worked out, but sent only then
        self.garble: set[str] = set()  # routes that answer with a web page
        self.waiting: Counter[str] = Counter()  # requests held back now, by route
        self.forget_log_after: int | None = None  # lose what is beyond this, once
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self.here = False
        self.come_back()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def vanish(self) -> None:
        """Nobody listens any more, and open connections are dropped."""
        self.here = False
        assert self._server
        self._server.shutdown()
        self._server.server_close()

    def come_back(self) -> None:
        handler = type("Handler", (_Handler,), {"plane": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._port = self._server.server_address[1]
        self.here = True
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def close(self) -> None:
        for held in self.delay.values():
            held.set()
        if self.here:
            self.vanish()

    def log(self, attempt: str) -> str:
        return self.logs.get(attempt, bytearray()).decode(errors="replace")

    def hear(self, beat: Heartbeat) -> HeartbeatReply:
        with self._lock:
            self.beats.append(beat)
            return HeartbeatReply(
                assignment=self.assignment,
                next_heartbeat=self.next_beat,
                lease=self.lease,
                release=self.release,
            )

    def take_log(self, attempt: str, offset: int, data: bytes) -> tuple[int, int]:
        with self._lock:
            self.largest_chunk = max(self.largest_chunk, len(data))
            held = self.logs.setdefault(attempt, bytearray())
            if self.forget_log_after is not None and len(held) > self.forget_log_after:
                del held[self.forget_log_after :]
                self.forget_log_after = None
            if offset > len(held):
                return 409, len(held)
            held += data[len(held) - offset :]
            return 200, len(held)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    plane: FakeControlPlane

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        parts = urlsplit(self.path)
        if parts.path.endswith("/enter"):
            self._enter(encoding.from_json(body, SliceTokenRequest))
            return
        if not self._admitted(parts.path):
            return
        if parts.path.endswith("/beat"):
            reply = self.plane.hear(encoding.from_json(body, Heartbeat))
            held, self.plane.hold_next_reply = self.plane.hold_next_reply, None
            if held is not None:
                self._hold("reply", held)
            self._answer(200, encoding.to_json(reply))
        elif parts.path.endswith("/results"):
            self.plane.results[parse_qs(parts.query)["attempt"][0]] = body
            self.plane.phases_before_result = [beat.phase for beat in self.plane.beats]
            self._answer(200, b'{"done": true}')
        else:
            query = parse_qs(parts.query)
            status, size = self.plane.take_log(query["attempt"][0], int(query["offset"][0]), body)
            self._answer(status, json.dumps({"size": size}).encode())

    def _enter(self, entry: SliceTokenRequest) -> None:
        """As the control plane does it: the first nonce of a host counts."""
        if self.headers["Authorization"] != f"Bearer {self.plane.word}":
            self._fail(401, "Unauthorized", "not the word of this slice")
        elif self.plane.entered.setdefault(entry.host_id, entry.nonce) != entry.nonce:
            self._fail(403, "Forbidden", "another agent speaks for this host already")
        else:
            self._answer(200, encoding.to_json(SliceTokenReply(token=self.plane.token)))

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not self._admitted(path):
            return
        archive = self.plane.snapshots.get(path.rpartition("/")[2])
        if archive is None:
            self._fail(404, "NotFound", "no such snapshot")
        else:
            self._answer(200, archive)

    def _admitted(self, path: str) -> bool:
        route = path.removeprefix("/api/v1/agent/").partition("/")[0]
        held = self.plane.delay.get(route)
        if held is not None:
            self._hold(route, held)
        if not self.plane.here:
            self.close_connection = True
            return False
        if self.headers["Authorization"] != f"Bearer {self.plane.token}":
            self._fail(401, "Unauthorized", "no such token")
            return False
        if route in self.plane.refuse:
            self._fail(self.plane.refuse[route], "Refused", "told to refuse")
            return False
        if route in self.plane.garble:
            self.plane.waiting["garbled"] += 1
            self._answer(200, b"<html>please log in to the network</html>")
            return False
        return True

    def _hold(self, what: str, held: threading.Event) -> None:
        self.plane.waiting[what] += 1
        held.wait(30)
        self.plane.waiting[what] -= 1

    def _fail(self, status: int, kind: str, message: str) -> None:
        error = {"error": {"kind": kind, "message": message}}
        self._answer(status, json.dumps(error).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def wait_until(condition, within: float = 60.0, what: str = ""):
    """The first true value of the condition."""
    deadline = time.monotonic() + within
    while True:
        if value := condition():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"did not come true within {within} s {what}")
        time.sleep(0.01)
