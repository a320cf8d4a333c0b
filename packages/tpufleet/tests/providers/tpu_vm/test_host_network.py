"""The network of bare hosts, with a plain process in the namespace."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest

from tests.polling import wait_until
from tests.ports import free_port
from tests.providers.tpu_vm import host_network
from tests.providers.tpu_vm.host_network import HostNetwork, Switch, services_in
from tpufleet_testbed.cloud_tpu.metadata_server import MetadataServer

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


@contextlib.contextmanager
def process_with_a_network():
    """The id of a process whose network is its own."""
    with subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) as process:
        ours = os.stat("/proc/self/ns/net").st_ino
        wait_until(lambda: os.stat(f"/proc/{process.pid}/ns/net").st_ino != ours)
        yield str(process.pid)
        process.kill()


@pytest.fixture(autouse=True)
def no_interfaces_left():
    """Nothing is left on this machine."""
    host_network.require_namespaces()
    yield
    assert host_network.interfaces() == []


@pytest.fixture
def namespace():
    with process_with_a_network() as pid:
        yield pid


def entered(namespace, *command):
    return ["nsenter", f"--net=/proc/{namespace}/ns/net", *command]


def inside(namespace, *command):
    return subprocess.run(entered(namespace, *command), capture_output=True, text=True)


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
            for _ in range(2):
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
        answers = [inside(namespace, sys.executable, "-c", program, port) for _ in range(2)]
        thread.join(60)
        network.close()
    assert [each.stdout for each in answers] == ["got it\n"] * 2
    assert len(b"".join(received)) == 200_000


def test_hosts_at_a_switch_reach_each_other_but_not_this_machine(namespace, metadata):
    switch = Switch()
    with process_with_a_network() as other:
        addresses = {pid: switch.new_address() for pid in (namespace, other)}
        networks = {}
        for pid, address in addresses.items():
            own = {"network-interfaces/0/ip": address}
            networks[pid] = HostNetwork(pid, f"{metadata.url}/node/0", own)
            switch.plug_in(pid, address)
        where = METADATA.rpartition("attributes")[0] + "network-interfaces/0/ip"
        assert ask(namespace, where).stdout == f"{addresses[namespace]}\n"
        serve = (
            "import socket; s = socket.create_server((%r, 80)); print(1, flush=True); s.accept()"
        )
        command = [sys.executable, "-c", serve % addresses[other]]
        with subprocess.Popen(entered(other, *command), stdout=subprocess.PIPE) as server:
            assert server.stdout.readline() == b"1\n"
            reach = f"import socket; socket.create_connection(({addresses[other]!r}, 80), 60)"
            assert inside(namespace, sys.executable, "-c", reach).returncode == 0
        routes = inside(namespace, "ip", "route").stdout.splitlines()
        assert len(routes) == 1 and routes[0].startswith("10.9.0.0/24"), "to the hosts alone"
        for network in networks.values():
            network.close()
    switch.close()


def test_what_a_host_serves_can_be_reached_at_its_port(namespace, metadata):
    port = free_port()
    network = HostNetwork(namespace, f"{metadata.url}/node/0")
    network.expose(port)
    command = entered(namespace, sys.executable, "-m", "http.server", str(port))
    with subprocess.Popen([*command, "--bind", "127.0.0.1"], stderr=subprocess.DEVNULL) as server:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _answers(url))
        server.kill()
    network.close()


def _answers(url):
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status == 200
    except OSError:
        return False
