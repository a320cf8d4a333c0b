"""Metadata server of all emulated hosts, with hanging GET, on one port.

The root of a host is `/{node}/{host}/`; paths below it are those of a Compute Engine VM.
"""

from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

ROOT = "computeMetadata/v1/instance"
MAX_WAIT_SECONDS = 3600.0
SHUTDOWN_POLL_SECONDS = 0.02  # how soon a server notices that it is to end; the default is 0.5


class MetadataServer:
    """Values by node; every change wakes waiting requests."""

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._values: dict[str, dict[str, str]] = {}
        self._guest: dict[tuple[str, int], dict[tuple[str, str], str]] = {}  # by node and host
        self._changed = threading.Condition()
        self._closing = False
        self._host = address[0]
        self._server = ThreadingHTTPServer(address, self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(SHUTDOWN_POLL_SECONDS,),
            name="metadata",
            daemon=True,
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._server.server_port}"

    def put(self, node: str, values: dict[str, str]) -> None:
        """Set all values of a node's hosts, by path below `instance/`."""
        with self._changed:
            self._values[node] = dict(values)
            self._changed.notify_all()

    def set_value(self, node: str, path: str, value: str) -> None:
        with self._changed:
            if node in self._values:
                self._values[node][path] = value
                self._changed.notify_all()

    def remove(self, node: str) -> None:
        with self._changed:
            self._values.pop(node, None)
            self._guest = {key: values for key, values in self._guest.items() if key[0] != node}
            self._changed.notify_all()

    def guest_attributes(
        self, node: str, host: int, query_path: str = ""
    ) -> dict[tuple[str, str], str]:
        """By namespace and key. The path is empty, a namespace, or a namespace and a key."""
        namespace, _, key = query_path.strip("/").partition("/")
        with self._changed:
            return {
                name: value
                for name, value in self._guest.get((node, host), {}).items()
                if namespace in ("", name[0]) and key in ("", name[1])
            }

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

    def wait_for_change(
        self, node: str, host: int, path: str, known: str, seconds: float
    ) -> str | None:
        """The value once its ETag differs from `known`, or after `seconds`."""

        def differs() -> bool:
            value = self._read(node, host, path)
            return self._closing or value is None or etag(value) != known

        with self._changed:
            self._changed.wait_for(differs, min(seconds, MAX_WAIT_SECONDS))
            return None if self._closing else self._read(node, host, path)

    def _read(self, node: str, host: int, path: str) -> str | None:
        if path == "attributes/agent-worker-number":
            return str(host) if node in self._values else None
        return self._values.get(node, {}).get(path)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        respond, write = self._respond, self._write

        class MetadataHandler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                flavor = self.headers.get("Metadata-Flavor")
                try:
                    self._send(*respond(self.path, flavor))
                except ConnectionError:  # the host ended while it waited
                    self.close_connection = True

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
                self._send(*write(self.path, body, self.headers.get("Metadata-Flavor")))

            def _send(self, status: int, body: str, etag: str) -> None:
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
                """Not logged: hosts poll all the time."""

        return MetadataHandler

    def _respond(self, target: str, flavor: str | None) -> tuple[int, str, str]:
        if flavor != "Google":
            return 403, "Missing Metadata-Flavor:Google header.", ""
        parts = urlsplit(target)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        try:
            _, node, host, rest = unquote(parts.path).split("/", 3)
            index = int(host)
        except ValueError:
            return 404, "host not found", ""
        if not rest.startswith(f"{ROOT}/"):
            return 404, "not found", ""
        path = rest.removeprefix(f"{ROOT}/")
        if query.get("wait_for_change", "").lower() == "true":
            seconds = float(query.get("timeout_sec") or MAX_WAIT_SECONDS)
            known = query.get("last_etag", "") or self._current_etag(node, index, path)
            value = self.wait_for_change(node, index, path, known, seconds)
        else:
            value = self.read(node, index, path)
        return (404, "not found", "") if value is None else (200, value, etag(value))

    def _write(self, target: str, value: str, flavor: str | None) -> tuple[int, str, str]:
        """Guest attributes, the only values that a host may write; only where they are enabled."""
        if flavor != "Google":
            return 403, "Missing Metadata-Flavor:Google header.", ""
        try:
            _, node, host, rest = unquote(urlsplit(target).path).split("/", 3)
            root, namespace, key = rest.rsplit("/", 2)
            index = int(host)
        except ValueError:
            return 404, "not found", ""
        enabled = (self.read(node, index, "attributes/enable-guest-attributes") or "").upper()
        if root != f"{ROOT}/guest-attributes":
            return 404, "not found", ""
        if enabled != "TRUE":
            return 403, "guest attributes are disabled", ""
        with self._changed:
            self._guest.setdefault((node, index), {})[namespace, key] = value
        return 200, "", ""

    def _current_etag(self, node: str, host: int, path: str) -> str:
        value = self.read(node, host, path)
        return "" if value is None else etag(value)


def etag(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:16]


def instance_values(attributes: dict[str, str], **more: str) -> dict[str, str]:
    """Values of a new host: its attributes, no notice, and `more`."""
    return {
        "preempted": "FALSE",
        "maintenance-event": "NONE",
        **{f"attributes/{key}": value for key, value in attributes.items()},
        **{key.replace("_", "-"): value for key, value in more.items()},
    }
