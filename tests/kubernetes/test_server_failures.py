"""API servers that fall silent or answer nonsense: it is noticed, and no thread dies of it."""

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
from tpufleet.clocks import ManualClock
from tpufleet.errors import BadInput, NotFound, ProviderUnavailable
from tpufleet.kubernetes.connections import POD, Connection
from tpufleet.kubernetes.leader_election import LeaderElector
from tpufleet.kubernetes.probes import ProbeServer
from tpufleet.kubernetes.watch_cache import WatchCache

NOBODY: dict[str, Any] = {"items": [], "metadata": {"resourceVersion": "7"}}


class BadServer(ThreadingHTTPServer):
    """Lists nothing, begins every watch and then says no more; elsewhere it is not itself."""

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
            self.server.closing.wait(60)
        elif self.path.startswith("/api/v1/pods"):
            self.server.lists += 1
            self._say(200, json.dumps(NOBODY).encode(), {"Content-Type": "application/json"})
        else:
            self._say(*ANSWERS[self.path.rpartition("/")[2]])

    def _say(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


ANSWERS = {
    "page": (502, b"<html>bad gateway</html>", {"Content-Type": "text/html"}),
    "unnamed": (503, b"try later", {}),
    "half": (200, b'{"metadata": {', {"Content-Type": "application/json"}),
    "list": (500, b"[]", {"Content-Type": "application/json"}),
    "missing": (404, b"<html>", {"Content-Type": "text/html"}),
}


@pytest.fixture
def server() -> Iterator[BadServer]:
    server = BadServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()
    thread.join(60)


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
    made = Connection(path, timeout=0.5, watch_seconds=1)
    yield made
    made.close()


def test_a_watch_on_a_server_that_fell_silent_is_begun_anew(server, connection):
    mirror = WatchCache(connection, POD, lambda: None).start()
    try:
        wait_until(lambda: server.watches >= 2 and server.lists >= 2, 30, lambda: server.watches)
    finally:
        mirror.close()


@pytest.mark.parametrize("name", [name for name in ANSWERS if name != "missing"])
def test_an_answer_that_no_api_server_gives_may_be_asked_for_again(connection, name):
    with pytest.raises(ProviderUnavailable, match=f"get Pod {name}"):
        connection.get(POD, name, "n")


def test_a_proxy_that_says_not_found_is_believed(connection):
    with pytest.raises(NotFound):
        connection.get(POD, "missing", "n")


class Stumbling:
    """Fails once in a way that nobody foresaw, then has a lease for whoever asks."""

    def __init__(self) -> None:
        self.asked = 0

    def find(self, *_: object) -> None:
        self.asked += 1
        if self.asked == 1:
            raise RuntimeError("nobody foresaw this")

    def create(self, *_: object) -> None:
        return


def test_a_leader_that_stumbles_tries_again():
    leadership = LeaderElector(
        Stumbling(),
        ManualClock(),
        name="l",
        namespace="n",
        identity="us",  # type: ignore[arg-type]
    )
    leadership.acquire_or_renew()
    assert not leadership.leading
    leadership.acquire_or_renew()
    assert leadership.leading


KUBECONFIGS = {
    "not there": (None, "not found"),
    "no YAML": ("a: [", "no way to the cluster"),
    "no kubeconfig": ("hello", "no way to the cluster"),
    "no context": ("apiVersion: v1\nkind: Config\ncurrent-context: c\n", "no way to the cluster"),
}


@pytest.mark.parametrize(("text", "words"), KUBECONFIGS.values(), ids=KUBECONFIGS)
def test_a_kubeconfig_that_leads_nowhere_is_told_by_its_name(tmp_path, text, words):
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=words) as told:
        Connection(path)
    assert str(path) in str(told.value)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:", "127.0.0.1:99999"])
def test_an_address_that_nobody_can_listen_on_is_told(address):
    with pytest.raises(BadInput, match=address):
        ProbeServer(address, {})


def test_an_address_that_is_taken_is_told_and_any_free_one_is_found():
    pages = ProbeServer("127.0.0.1:0", {})
    try:
        with pytest.raises(BadInput, match="in use"):
            ProbeServer(pages.address, {})
    finally:
        pages.start().close()
