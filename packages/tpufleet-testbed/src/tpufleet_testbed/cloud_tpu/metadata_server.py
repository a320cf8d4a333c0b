"""Metadata server of all emulated hosts, with hanging GET, on one port.

The root of a host is `/{node}/{host}/`; paths below it are those of a Compute Engine VM.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from urllib.parse import parse_qs, unquote, urlsplit

from tpufleet_testbed.servers import Answer, HttpServer

ROOT = "computeMetadata/v1/instance"
MAX_WAIT_SECONDS = 3600.0
NOT_FOUND = 404, "not found"


class MetadataServer:
    """Values by node; every change wakes waiting requests."""

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._values: dict[str, dict[str, str]] = {}
        self._guest: dict[tuple[str, int], dict[tuple[str, str], str]] = {}  # by node and host
        self._changed = threading.Condition()
        self._closing = False
        self._server = HttpServer(self._answer, address)
        self.url = self._server.url

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
        self._server.close()

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
        values = self._values.get(node, {})
        if path == "attributes/agent-worker-number" and values:
            return values.get(path, str(host))
        return values.get(path)

    def _answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        status, text = self._respond(method, target, headers, body.decode())
        answered = {"Content-Type": "application/text", "Metadata-Flavor": "Google"}
        if method == "GET" and status == 200:
            answered["ETag"] = etag(text)
        return status, answered, text.encode()

    def _respond(
        self, method: str, target: str, headers: Mapping[str, str], body: str
    ) -> tuple[int, str]:
        if headers.get("metadata-flavor") != "Google":
            return 403, "Missing Metadata-Flavor:Google header."
        parts = urlsplit(target)
        try:
            _, node, host, rest = unquote(parts.path).split("/", 3)
            index = int(host)
        except ValueError:
            return NOT_FOUND
        if not rest.startswith(f"{ROOT}/"):
            return NOT_FOUND
        path = rest.removeprefix(f"{ROOT}/")
        if method != "GET":
            return self._write(node, index, path, body)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        if query.get("wait_for_change", "").lower() == "true":
            seconds = float(query.get("timeout_sec") or MAX_WAIT_SECONDS)
            known = query.get("last_etag", "") or self._current_etag(node, index, path)
            value = self.wait_for_change(node, index, path, known, seconds)
        else:
            value = self.read(node, index, path)
        return NOT_FOUND if value is None else (200, value)

    def _write(self, node: str, host: int, path: str, value: str) -> tuple[int, str]:
        """Guest attributes, the only values that a host may write; only where they are enabled."""
        root, _, name = path.partition("/")
        namespace, _, key = name.partition("/")
        if root != "guest-attributes" or not key or "/" in key:
            return NOT_FOUND
        enabled = self.read(node, host, "attributes/enable-guest-attributes") or ""
        if enabled.upper() != "TRUE":
            return 403, "guest attributes are disabled"
        with self._changed:
            self._guest.setdefault((node, host), {})[namespace, key] = value
        return 200, ""

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
