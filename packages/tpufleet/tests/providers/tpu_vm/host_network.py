"""The network of a bare host: a namespace of its own, in which only the metadata server, the other
hosts of its test and the services that the test gives it can be reached."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.polling import wait_until

METADATA_ADDRESS = "169.254.169.254"
Address = tuple[str, int]
_SERVICE = re.compile(r"(127(?:\.\d+){3}):(\d+)")
_CLONE_NEWNET = 0x40000000
_INSTANCE = "/computeMetadata/v1/instance/"
# Where a job finds its packages.
PACKAGE_INDEX = tuple(f"{name}.org" for name in ("pypi", "files.pythonhosted"))


def services_in(texts: Iterable[str]) -> set[Address]:
    """Those of this machine that are named there."""
    return {(host, int(port)) for text in texts for host, port in _SERVICE.findall(text)}


def require_namespaces() -> None:
    """Skip where no network of its own can be made, with the reason."""
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("network namespaces need Linux and root")
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    pair = ["unshare", "--net", "ip", "link", "add", "one", "type", "veth", "peer", "name", "two"]
    done = subprocess.run(pair, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"network namespaces are not permitted: {done.stderr.strip()}")


def interfaces() -> list[str]:
    """Of hosts, in the network of this machine, where none belongs. Nodes of other tests have some
    there, which come and go."""
    return [name for name in os.listdir("/sys/class/net") if re.fullmatch(r"hosts|port\d+", name)]


def address_of(name: str) -> str:
    """Of a service of the internet, inside hosts that are given it."""
    return f"127.9.9.{1 + sum(name.encode()) % 250}"


class Switch:
    """What joins the hosts of one test: a bridge in a namespace in which nothing else is. All of it
    is gone with that namespace."""

    def __init__(self) -> None:
        require_namespaces()
        self._process = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        ours = os.stat("/proc/self/ns/net").st_ino
        self._namespace = f"/proc/{self._process.pid}/ns/net"
        wait_until(lambda: os.stat(self._namespace).st_ino != ours)
        self._ports, self._addresses = itertools.count(1), itertools.count(2)
        _ip(self._namespace, "link add hosts type bridge")
        _ip(self._namespace, "link set hosts up")

    def new_address(self) -> str:
        return f"10.9.0.{next(self._addresses)}"

    def plug_in(self, pid: str, address: str) -> None:
        port = f"port{next(self._ports)}"
        _ip(self._namespace, f"link add {port} type veth peer name eth0 netns {pid}")
        _ip(self._namespace, f"link set {port} master hosts up")
        inside = f"/proc/{pid}/ns/net"
        _ip(inside, f"address add {address}/24 dev eth0")
        _ip(inside, "link set eth0 up")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class HostNetwork:
    """Of the namespace of a process, as long as that lives. `metadata_url`: what the host asks at
    the address of the metadata server goes there; `own` are the values of this host alone."""

    def __init__(self, pid: str, metadata_url: str, own: Mapping[str, str] | None = None) -> None:
        require_namespaces()
        self._namespace = f"/proc/{pid}/ns/net"
        self._listeners: list[socket.socket] = []
        self._given: set[Address] = set()
        for command in ("link set lo up", f"address add {METADATA_ADDRESS}/32 dev lo"):
            _ip(self._namespace, command)
        self._metadata = ThreadingHTTPServer(
            (METADATA_ADDRESS, 80), _relay_to(metadata_url, own or {}), bind_and_activate=False
        )
        self._metadata.socket.close()
        self._metadata.socket = self._inside(socket.create_server, (METADATA_ADDRESS, 80))
        threading.Thread(target=self._metadata.serve_forever, args=(0.02,), daemon=True).start()

    def give(self, services: Iterable[Address]) -> None:
        """Let the host reach these services of this machine, under their addresses. Where nothing
        listens, the host is refused, too."""
        for address in filter(_is_served, set(services) - self._given):
            self._give(address, address)

    def give_names(self, names: Iterable[str]) -> None:
        """Services of the internet, at the address of their name."""
        for name in names:
            for port in (80, 443):
                self._give((address_of(name), port), (name, port))

    def expose(self, port: int) -> None:
        """What the host serves on its port can be reached from this machine."""
        listener = socket.create_server(("127.0.0.1", port), backlog=64)
        self._forward(listener, ("127.0.0.1", port), self._connect_inside)

    def close(self) -> None:
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._metadata.shutdown()
        self._metadata.server_close()

    def _give(self, address: Address, target: Address) -> None:
        self._given.add(address)
        listener = self._inside(lambda where: socket.create_server(where, backlog=64), address)
        self._forward(listener, target, socket.create_connection)

    def _forward(
        self, listener: socket.socket, target: Address, connect: Callable[[Address], socket.socket]
    ) -> None:
        self._listeners.append(listener)
        arguments = (listener, target, connect)
        threading.Thread(target=_forward, args=arguments, daemon=True).start()

    def _connect_inside(self, address: Address) -> socket.socket:
        return self._inside(socket.create_connection, address)

    def _inside(self, make: Callable[[Address], socket.socket], address: Address) -> socket.socket:
        """A socket stays in the namespace that the thread was in when it made it."""

        def enter_and_make() -> socket.socket:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(self._namespace) as namespace:
                if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            return make(address)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(enter_and_make).result()


def _ip(namespace: str, command: str) -> None:
    inside = ["nsenter", f"--net={namespace}", "ip", *command.split()]
    done = subprocess.run(inside, capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"ip {command}: {done.stderr}")


def _is_served(address: Address) -> bool:
    try:
        socket.create_connection(address).close()
    except OSError:
        return False
    return True


def _forward(
    listener: socket.socket, target: Address, connect: Callable[[Address], socket.socket]
) -> None:
    while True:
        try:
            inside, _ = listener.accept()
        except OSError:
            return  # closed
        try:
            outside = connect(target)
        except OSError:
            inside.close()
            continue
        for ends in ((inside, outside), (outside, inside)):
            threading.Thread(target=_copy, args=ends, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(2**16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, target):
            each.close()


def _relay_to(url: str, own: Mapping[str, str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if value := own.get(self.path.partition("?")[0].removeprefix(_INSTANCE)):
                self._answer(200, {"Metadata-Flavor": "Google"}, value.encode())
                return
            size = int(self.headers.get("Content-Length") or 0)
            headers = {name: value for name, value in self.headers.items() if name != "Host"}
            request = urllib.request.Request(
                url + self.path, self.rfile.read(size) or None, headers, method=self.command
            )
            try:
                answer = urllib.request.urlopen(request, timeout=900)
            except urllib.error.HTTPError as error:
                answer = error
            except OSError:  # the test has ended
                return
            with answer:
                self._answer(answer.status, dict(answer.headers), answer.read())

        def _answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the host that asked is off
                self.wfile.write(body)

        do_PUT = do_POST = do_DELETE = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    return Handler
