"""HTTPS with a certificate of a private CA."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.polling import wait_until
from tests.server_process import Server
from tests.service.harness import ServiceHarness
from tests.service.test_connection_limits import is_closed
from tpufleet.client.agents import AgentClient
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import Unreachable
from tpufleet.model.api_types import NewJob
from tpufleet.model.jobs import JobId, JobState
from tpufleet.service.connection_limits import ConnectionLimits
from tpufleet.service.http_server import make_server


class Certificate(NamedTuple):
    cert: Path
    key: Path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl program to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    certificate = Certificate(folder / "cert.pem", folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=fleet", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(certificate.key), "-out", str(certificate.cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    certificate.key.chmod(0o600)
    return certificate


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


def test_an_unknown_certificate_and_plain_http_are_rejected(secure):
    for url in (f"https://127.0.0.1:{secure.port}", f"http://127.0.0.1:{secure.port}"):
        with (
            FleetClient(url, secure.tokens["mel"]) as client,
            pytest.raises(Unreachable, match="cannot reach the control plane"),
        ):
            client.me()


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


CLIENT_HELLO_PREFIX = bytes.fromhex("1603010200010001fc0303")  # of 517 bytes


@pytest.mark.parametrize("sent", [b"", CLIENT_HELLO_PREFIX], ids=["silent", "half a hello"])
def test_slow_handshakes_do_not_use_up_the_connections(service, certificate, sent):
    service.stop()
    limits = ConnectionLimits(connections=50, strangers=20, handshake_seconds=60)
    service.start(
        make_server=lambda app: make_server(
            app, limits, tls_cert=certificate.cert, tls_key=certificate.key
        )
    )
    url = f"https://127.0.0.1:{service.port}"
    agent = AgentClient(url, service.slice_token("s1"), certificate.cert)
    with ExitStack() as stack:
        stack.callback(agent.close)
        service.add_slice("s1", None)
        agent.send_heartbeat(service.make_heartbeat("s1/0"))
        slow = []
        for _ in range(200):
            slow.append(stack.enter_context(socket.create_connection(("127.0.0.1", service.port))))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # closed, as it should
                slow[-1].sendall(sent)
        wait_until(lambda: sum(is_closed(each) for each in slow) >= 200 - limits.strangers, 30)
        agent.send_heartbeat(service.make_heartbeat("s1/0"))
        with FleetClient(url, service.tokens["mel"], ca_file=certificate.cert) as client:
            assert client.me().name == "mel"
        assert service.stop() < 4  # does not wait for them
        service.start()


def test_a_handshake_that_takes_too_long_is_disconnected(service, certificate):
    service.stop()
    limits = ConnectionLimits(connections=50, strangers=20, handshake_seconds=0.2)
    service.start(
        make_server=lambda app: make_server(
            app, limits, tls_cert=certificate.cert, tls_key=certificate.key
        )
    )
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        wait_until(lambda: is_closed(connection), 10)
