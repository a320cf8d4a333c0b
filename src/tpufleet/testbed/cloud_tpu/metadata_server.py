"""The metadata server of every emulated host, with hanging GET, on one port.

A host's own root is `/{node}/{host}/`; below it everything is as on a real machine.
"""

from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

ROOT = "computeMetadata/v1/instance"
LONGEST_WAIT = 3600.0


class MetadataServer:
    """Values by node; every change wakes those who wait for one."""

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._values: dict[str, dict[str, str]] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._server = ThreadingHTTPServer(address, self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metadata", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host}:{port}"

    def put(self, node: str, values: dict[str, str]) -> None:
        """All values of a node's hosts, keyed by path below `instance/`."""
        with self._changed:
            self._values[node] = dict(values)
            self._changed.notify_all()

    def change(self, node: str, path: str, value: str) -> None:
        with self._changed:
            if node in self._values:
                self._values[node][path] = value
                self._changed.notify_all()

    def drop(self, node: str) -> None:
        with self._changed:
            self._values.pop(node, None)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def read(self, node: str, host: int, path: str) -> str | None:
        with self._changed:
            return self._read(node, host, path)

    def wait(self, node: str, host: int, path: str, known: str, seconds: float) -> str | None:
        """The value once its tag is no longer the known one, or when time is up."""

        def differs() -> bool:
            value = self._read(node, host, path)
            return self._closing or value is None or etag(value) != known

        with self._changed:
            self._changed.wait_for(differs, min(seconds, LONGEST_WAIT))
            return None if self._closing else self._read(node, host, path)

    def _read(self, node: str, host: int, path: str) -> str | None:
        if path == "attributes/agent-worker-number":
            return str(host) if node in self._values else None
        return self._values.get(node, {}).get(path)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self._answer

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                flavour = self.headers.get("Metadata-Flavor")
                try:
                    self._say(*answer(self.path, flavour))
                except ConnectionError:  # its machine was taken away while it waited
                    self.close_connection = True

            def _say(self, status: int, body: str, etag: str) -> None:
                payload = body.encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/text")
                self.send_header("Metadata-Flavor", "Google")
                if etag:
                    self.send_header("ETag", etag)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet: hosts ask all the time."""

        return Handler

    def _answer(self, target: str, flavour: str | None) -> tuple[int, str, str]:
        if flavour != "Google":
            return 403, "Missing Metadata-Flavor:Google header.", ""
        parts = urlsplit(target)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        try:
            _, node, host, rest = unquote(parts.path).split("/", 3)
            index = int(host)
        except ValueError:
            return 404, "no such host", ""
        if not rest.startswith(f"{ROOT}/"):
            return 404, "not found", ""
        path = rest.removeprefix(f"{ROOT}/")
        if query.get("wait_for_change", "").lower() == "true":
            seconds = float(query.get("timeout_sec") or LONGEST_WAIT)
            known = query.get("last_etag", "") or self._tag_now(node, index, path)
            value = self.wait(node, index, path, known, seconds)
        else:
            value = self.read(node, index, path)
        return (404, "not found", "") if value is None else (200, value, etag(value))

    def _tag_now(self, node: str, host: int, path: str) -> str:
        value = self.read(node, host, path)
        return "" if value is None else etag(value)


def etag(value: str) -> str:
    """Changes with the value."""
    return hashlib.sha256(value.encode()).hexdigest()[:16]


def instance_values(attributes: dict[str, str], **more: str) -> dict[str, str]:
    """What a fresh host sees: its attributes, no notice, and what else the caller knows."""
    return {
        "preempted": "FALSE",
        "maintenance-event": "NONE",
        **{f"attributes/{key}": value for key, value in attributes.items()},
        **{key.replace("_", "-"): value for key, value in more.items()},
    }
