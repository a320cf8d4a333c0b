"""The network of bare hosts, with a plain process in the namespace."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading

import pytest

from tests.polling import wait_until
from tests.providers.tpu_vm.host_network import HostNetwork, services_in
from tpufleet_testbed.cloud_tpu.metadata_server import MetadataServer

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux" or shutil.which("ip") is None,
    reason="needs Linux, root and iproute2",
)
METADATA = "http://169.254.169.254/computeMetadata/v1/instance/attributes/server"
ASK = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Metadata-Flavor": "Google"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


@pytest.fixture
def metadata():
    server = MetadataServer()
    yield server
    server.close()


@pytest.fixture
def namespace():
    """The id of a process whose network is its own."""
    with subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) as process:
        ours = os.stat("/proc/self/ns/net").st_ino
        wait_until(lambda: os.stat(f"/proc/{process.pid}/ns/net").st_ino != ours)
        yield str(process.pid)
        process.kill()


def inside(namespace, *command):
    entered = ["nsenter", f"--net=/proc/{namespace}/ns/net", *command]
    return subprocess.run(entered, capture_output=True, text=True)


def ask(namespace, url):
    return inside(namespace, sys.executable, "-c", ASK, url)


def test_a_host_has_the_metadata_server_and_the_services_that_it_is_given(namespace, metadata):
    url = metadata.url
    metadata.put("node", {"attributes/server": url, "attributes/hidden": "no"})
    network = HostNetwork(namespace, f"{metadata.url}/node/0")
    try:
        assert ask(namespace, METADATA).stdout == f"{url}\n"
        direct = f"{url}/node/0/computeMetadata/v1/instance/attributes/server"
        assert "refused" in ask(namespace, direct).stderr, "it was not given"
        network.give(services_in([f"the server is {url}/api"]))
        assert ask(namespace, direct).stdout == f"{url}\n"
        routes = inside(namespace, "cat", "/proc/net/route").stdout.splitlines()
        assert len(routes) == 1, "the header: no route leaves the host"
    finally:
        network.close()
    assert "refused" in ask(namespace, METADATA).stderr


def test_what_a_host_sends_arrives_and_is_answered(namespace, metadata):
    with socket.create_server(("127.0.0.1", 0)) as server:
        network = HostNetwork(namespace, f"{metadata.url}/node/0")
        network.give({server.getsockname()[:2]})
        received = []

        def echo() -> None:
            server.accept()[0].close()  # whether something listens
            with server.accept()[0] as connection:
                while data := connection.recv(4096):
                    received.append(data)
                connection.sendall(b"got it")

        thread = threading.Thread(target=echo)
        thread.start()
        program = (
            "import socket, sys; c = socket.create_connection(('127.0.0.1', int(sys.argv[1])));"
            "c.sendall(b'x' * 100_000); c.shutdown(socket.SHUT_WR); print(c.recv(99).decode())"
        )
        port = str(server.getsockname()[1])
        answer = inside(namespace, sys.executable, "-c", program, port)
        thread.join(60)
        network.close()
    assert answer.stdout == "got it\n" and len(b"".join(received)) == 100_000
