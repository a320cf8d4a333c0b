"""API servers that go silent or send invalid responses: errors are typed and threads survive."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube", reason="needs the extra `k8s`: pip install 'tpufleet[k8s]'")

from tests.server_process import wait_until
from tpufleet.errors import BadInput, NotFound, ProviderUnavailable
from tpufleet.kubernetes.connections import POD, Connection
from tpufleet.kubernetes.probes import ProbeServer
from tpufleet.kubernetes.watch_cache import WatchCache

EMPTY_LIST: dict[str, Any] = {"items": [], "metadata": {"resourceVersion": "7"}}


class BadServer(ThreadingHTTPServer):
    """Lists no pods, accepts watches and then stays silent; other paths give invalid responses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lists, self.watches = 0, 0
        self.closing = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: BadServer

    def do_GET(self) -> None:
        if "watch=" in self.path:
            self.server.watches += 1
            self.send_response(200)
            self.end_headers()
            self.wfile.flush()
            self.server.closing.wait(900)
        elif self.path.startswith("/api/v1/pods"):
            self.server.lists += 1
            self._respond(
                200, json.dumps(EMPTY_LIST).encode(), {"Content-Type": "application/json"}
            )
        else:
            self._respond(*RESPONSES[self.path.rpartition("/")[2]])

    def _respond(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


RESPONSES = {
    "page": (502, b"<html>bad gateway</html>", {"Content-Type": "text/html"}),
    "unnamed": (503, b"try later", {}),
    "half": (200, b'{"metadata": {', {"Content-Type": "application/json"}),
    "list": (500, b"[]", {"Content-Type": "application/json"}),
    "missing": (404, b"<html>", {"Content-Type": "text/html"}),
}


@pytest.fixture
def server() -> Iterator[BadServer]:
    server = BadServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()
    thread.join(900)


@pytest.fixture
def connection(server: BadServer, tmp_path: Path) -> Iterator[Connection]:
    host, port = server.server_address[:2]
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": f"http://{host}:{port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }  # fmt: skip
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    connection = Connection(path, timeout=3, watch_seconds=1)
    yield connection
    connection.close()


def test_a_silent_watch_is_reopened(server, connection):
    cache = WatchCache(connection, POD, lambda: None).start()
    try:
        wait_until(lambda: server.watches >= 2 and server.lists >= 2, 30, lambda: server.watches)
    finally:
        cache.close()


@pytest.mark.parametrize("name", [name for name in RESPONSES if name != "missing"])
def test_an_invalid_response_is_a_temporary_error(connection, name):
    with pytest.raises(ProviderUnavailable, match=f"get Pod {name}"):
        connection.get(POD, name, "n")


def test_a_404_without_a_status_body_is_not_found(connection):
    with pytest.raises(NotFound):
        connection.get(POD, "missing", "n")


KUBECONFIGS = {
    "missing": (None, "not found"),
    "not YAML": ("a: [", "cannot read"),
    "not a kubeconfig": ("hello", "cannot read"),
    "no context": (
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n",
        "cannot read",
    ),
}


@pytest.mark.parametrize(("text", "message"), KUBECONFIGS.values(), ids=KUBECONFIGS)
def test_an_unusable_kubeconfig_is_named_in_the_error(tmp_path, text, message):
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=message) as raised:
        Connection(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:", "127.0.0.1:99999"])
def test_an_invalid_address_is_named_in_the_error(address):
    with pytest.raises(BadInput, match=address):
        ProbeServer(address, {})


def test_an_address_in_use_is_an_error_and_port_0_finds_a_free_one():
    pages = ProbeServer("127.0.0.1:0", {})
    try:
        with pytest.raises(BadInput, match="in use"):
            ProbeServer(pages.address, {})
    finally:
        pages.start().close()
