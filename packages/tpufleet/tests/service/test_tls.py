"""HTTPS with a certificate of a private CA."""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from tests.certificates import Certificate, make_certificate
from tests.polling import wait_until
from tests.server_process import Server
from tests.service.harness import ServiceHarness
from tests.views.cli_runner import Tpu
from tpufleet import config, web_server
from tpufleet.client import tls
from tpufleet.client.agents import AgentClient
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import BadInput, Unreachable, UntrustedCertificate
from tpufleet.model.api_types import NewJob
from tpufleet.model.job.jobs import JobId, JobState
from tpufleet.service.transport.http_server import make_server
from tpufleet.web_server import listen


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def secure(service: ServiceHarness, certificate: Certificate) -> Iterator[ServiceHarness]:
    service.stop()
    service.start(
        make_server=lambda app: make_server(app, tls_cert=certificate.cert, tls_key=certificate.key)
    )
    yield service


def test_clients_and_agents_trust_the_configured_ca(secure, certificate):
    url = f"https://127.0.0.1:{secure.port}"
    with FleetClient(url, secure.tokens["mel"], ca_file=certificate.cert) as client:
        assert client.me().name == "mel"
    secure.add_slice("s1", None)
    agent = AgentClient(url, secure.slice_token("s1"), certificate.cert)
    try:
        assert agent.send_heartbeat(secure.make_heartbeat("s1/0")).assignment is None
    finally:
        agent.close()


def test_a_key_of_another_certificate_is_named_before_the_server_starts(certificate, tmp_path):
    other = make_certificate(tmp_path)

    def settings(key: Path) -> config.Config:
        files = {"TPUFLEET_TLS_CERT": str(certificate.cert), "TPUFLEET_TLS_KEY": str(key)}
        return config.load(files, tmp_path)

    for key in (other.key, certificate.cert):
        with pytest.raises(BadInput, match=f"tls_key: {key} is not the private key of"):
            settings(key).check_certificate()
    settings(certificate.key).check_certificate()


def test_an_unknown_certificate_and_plain_http_are_rejected(secure):
    for url in (f"https://127.0.0.1:{secure.port}", f"http://127.0.0.1:{secure.port}"):
        with (
            FleetClient(url, secure.tokens["mel"]) as client,
            pytest.raises(Unreachable, match="cannot reach the server"),
        ):
            client.me()


def test_a_slow_client_receives_all_of_a_response_after_which_the_connection_closes(
    certificate,
):
    size = 8 << 20
    whole = Route("/whole", lambda request: Response(b"x" * size))
    app = Starlette(routes=[whole])
    app.state.hub = SimpleNamespace(close=lambda: None)
    server = make_server(app, tls_cert=certificate.cert, tls_key=certificate.key)
    listener = listen("127.0.0.1:0")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        with socket.create_connection(listener.getsockname()) as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            context = ssl.create_default_context(cafile=certificate.cert)
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as client:
                client.sendall(b"GET /whole HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                received = 0
                while data := client.recv(1 << 16):
                    received += len(data)
                    time.sleep(0.01)
    finally:
        server.should_exit = True
        thread.join(timeout=900)
    assert received > size


@pytest.mark.parametrize("scheme", ["HTTPS", "Https", "hTTps"])
def test_certificates_are_checked_however_the_scheme_is_written(secure, scheme):
    url = f"{scheme}://127.0.0.1:{secure.port}"
    with (
        FleetClient(url, secure.tokens["mel"]) as client,
        pytest.raises(UntrustedCertificate),
    ):
        client.me()
    assert tls.proxy_for(url, {"HTTPS_PROXY": "proxy:1", "NO_PROXY": "none"}) == "http://proxy:1"
    agent = AgentClient(url, secure.slice_token("s1"))
    try:
        with pytest.raises(UntrustedCertificate):
            agent.send_heartbeat(secure.make_heartbeat("s1/0"))
    finally:
        agent.close()


def test_a_certificate_that_is_not_trusted_comes_with_the_setting_for_it(secure):
    with (
        FleetClient(f"https://127.0.0.1:{secure.port}", secure.tokens["mel"]) as client,
        pytest.raises(UntrustedCertificate) as refused,
    ):
        client.me()
    assert "`ca_file`" in str(refused.value) and "tpu serve" not in str(refused.value)


def test_a_renewed_certificate_is_used_without_a_restart(service, tmp_path, monkeypatch):
    """The files are replaced one after the other, as ACME clients do."""
    monkeypatch.setattr(web_server, "CERTIFICATE_CHECK_SECONDS", 0.1)
    for name in ("used", "renewed"):
        (tmp_path / name).mkdir()
    used, renewed = (make_certificate(tmp_path / name) for name in ("used", "renewed"))
    first, second = used.cert.read_bytes(), renewed.cert.read_bytes()
    service.stop()
    service.start(make_server=lambda app: make_server(app, tls_cert=used.cert, tls_key=used.key))

    def presented() -> bytes:
        return ssl.get_server_certificate(("127.0.0.1", service.port)).encode()

    assert presented() == first
    os.replace(renewed.cert, used.cert)
    time.sleep(0.5)
    assert presented() == first, "the key does not match yet"
    os.replace(renewed.key, used.key)
    wait_until(lambda: presented() == second)
    used.cert.unlink()
    time.sleep(0.5)
    assert presented() == second, "a file that is missing for a moment changes nothing"


def test_commands_on_the_machine_of_a_public_server_need_no_settings(tmp_path):
    """Its certificate is for its public name, and it listens on all addresses."""
    certificate = make_certificate(tmp_path, "DNS:fleet.example.com")
    server = Server(
        tmp_path / "home",
        TPUFLEET_LISTEN="0.0.0.0:0",
        TPUFLEET_PUBLIC_URL="https://fleet.example.com:8470",
        TPUFLEET_PROVIDERS="local",
        TPUFLEET_TLS_CERT=str(certificate.cert),
        TPUFLEET_TLS_KEY=str(certificate.key),
    )
    tpu = Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path / "home"), HTTPS_PROXY="http://x:1")
    try:
        server.launch()
        wait_until(lambda: tpu("status").exit_code == 0, 90, server.log_tail)
        assert tpu.json("jobs")["jobs"] == []
        other = make_certificate(tmp_path / "home", "DNS:fleet.example.com")
        os.replace(other.cert, certificate.cert)  # not the one that the server uses
        assert "certificate verify failed" in tpu("jobs").stderr
    finally:
        server.cleanup()


def test_a_job_runs_on_a_server_with_tls(certificate, tmp_path):
    server = Server(
        tmp_path / "home",
        TPUFLEET_TLS_CERT=str(certificate.cert),
        TPUFLEET_TLS_KEY=str(certificate.key),
        TPUFLEET_CA_FILE=str(certificate.cert),
    )
    try:
        server.start()
        assert server.url.startswith("https://")
        spec = {"name": "job", "command": ["true"], "accelerator": "v5e-4"}
        server.client.submit([NewJob(id=JobId("job-1"), spec=spec)])
        wait_until(
            lambda: server.client.job("job-1").job.state is JobState.SUCCEEDED, 90, server.log_tail
        )
    finally:
        server.cleanup()


@pytest.mark.slow
def test_hosts_of_a_cloud_get_the_private_ca_with_their_metadata(certificate, tmp_path):
    pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")
    from tests.providers.tpu_vm.emulated_fleet import Fleet
    from tpufleet_testbed.cloud_tpu.locations import IMMEDIATE

    # The file also holds the key, which must stay here.
    both = tmp_path / "both.pem"
    both.write_text(certificate.key.read_text() + certificate.cert.read_text())
    fleet = Fleet(
        tmp_path / "fleet",
        ("us-central1-a",),
        latencies=IMMEDIATE,
        environ={
            "TPUFLEET_TLS_CERT": str(certificate.cert),
            "TPUFLEET_TLS_KEY": str(certificate.key),
            "TPUFLEET_CA_FILE": str(both),
        },
    )
    try:
        [job] = fleet.submit({"command": ["true"]})
        fleet.until(lambda: fleet.nodes() != [], "a node is created")
        with fleet.emulator.cloud.lock:
            [node] = fleet.emulator.cloud.nodes.values()
            assert node.template.metadata["tpufleet-ca"] == certificate.cert.read_text()
        fleet.until(lambda: fleet.states()[job] == "succeeded", "the job succeeds")
    finally:
        fleet.close()


class ConnectProxy:
    """Forwards CONNECT requests, as an egress proxy does; remembers their targets."""

    def __init__(self) -> None:
        self.targets: list[str] = []
        proxy = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                target = self.rfile.readline().split()[1].decode()
                while self.rfile.readline().strip():
                    pass
                proxy.targets.append(target)
                host, _, port = target.rpartition(":")
                with socket.create_connection((host, int(port))) as upstream:
                    self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                    back = threading.Thread(target=self._copy, args=(upstream, self.connection))
                    back.start()
                    self._copy(self.connection, upstream)
                    back.join()

            @staticmethod
            def _copy(source: socket.socket, target: socket.socket) -> None:
                with contextlib.suppress(OSError):
                    while data := source.recv(65536):
                        target.sendall(data)
                with contextlib.suppress(OSError):
                    target.shutdown(socket.SHUT_WR)

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def egress_proxy() -> Iterator[ConnectProxy]:
    proxy = ConnectProxy()
    yield proxy
    proxy.server.shutdown()
    proxy.server.server_close()


def test_clients_and_agents_use_the_egress_proxy(secure, certificate, egress_proxy, monkeypatch):
    url = f"https://127.0.0.1:{secure.port}"
    monkeypatch.setenv("HTTPS_PROXY", egress_proxy.url)
    monkeypatch.setenv("NO_PROXY", "example.com")
    with FleetClient(url, secure.tokens["mel"], ca_file=certificate.cert) as client:
        assert client.me().name == "mel"
    assert len(egress_proxy.targets) == 1
    secure.add_slice("s1", None)
    environ = {"HTTPS_PROXY": egress_proxy.url}
    agent = AgentClient(
        url,
        secure.slice_token("s1"),
        ca_certificates=certificate.cert.read_text(),
        proxy=tls.proxy_for(url, environ),
    )
    try:
        assert agent.send_heartbeat(secure.make_heartbeat("s1/0")).assignment is None
    finally:
        agent.close()
    assert egress_proxy.targets == [f"127.0.0.1:{secure.port}"] * 2


@pytest.mark.parametrize(
    ("url", "environ", "proxy"),
    [
        ("https://fleet.example", {"HTTPS_PROXY": "http://p:1"}, "http://p:1"),
        ("https://fleet.example", {"https_proxy": "p:1"}, "http://p:1"),
        ("https://fleet.example", {"HTTPS_PROXY": "http://p:1", "NO_PROXY": ".example"}, None),
        ("https://fleet.example", {"HTTPS_PROXY": "http://p:1", "no_proxy": "*"}, None),
        ("https://fleet.example", {}, None),
        ("http://fleet.example", {"HTTPS_PROXY": "http://p:1", "HTTP_PROXY": "http://p:1"}, None),
    ],
)
def test_the_proxy_is_that_of_the_environment_and_never_sees_a_token(url, environ, proxy):
    assert tls.proxy_for(url, environ) == proxy
