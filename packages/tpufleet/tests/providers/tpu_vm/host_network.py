"""The network of a bare host: a namespace of its own, in which only the metadata server and the
services that the test gives it can be reached."""

from __future__ import annotations

import ctypes
import re
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

METADATA_ADDRESS = "169.254.169.254"
Address = tuple[str, int]
_SERVICE = re.compile(r"(127(?:\.\d+){3}):(\d+)")
_CLONE_NEWNET = 0x40000000


def services_in(texts: Iterable[str]) -> set[Address]:
    """Those of this machine that are named there."""
    return {(host, int(port)) for text in texts for host, port in _SERVICE.findall(text)}


class HostNetwork:
    """Of the namespace of a process, as long as that lives. `metadata_url`: what the host asks at
    the address of the metadata server goes there."""

    def __init__(self, pid: str, metadata_url: str) -> None:
        if shutil.which("ip") is None:
            pytest.skip("iproute2 is not installed")
        self._namespace = f"/proc/{pid}/ns/net"
        self._listeners: list[socket.socket] = []
        self._given: set[Address] = set()
        for command in ("link set lo up", f"address add {METADATA_ADDRESS}/32 dev lo"):
            inside = ["nsenter", f"--net={self._namespace}", "ip", *command.split()]
            subprocess.run(inside, check=True)
        self._metadata = ThreadingHTTPServer(
            (METADATA_ADDRESS, 80), _relay_to(metadata_url), bind_and_activate=False
        )
        self._metadata.socket.close()
        self._metadata.socket = self._listen((METADATA_ADDRESS, 80))
        threading.Thread(target=self._metadata.serve_forever, args=(0.02,), daemon=True).start()

    def give(self, services: Iterable[Address]) -> None:
        """Let the host reach these services of this machine, under their addresses. Where nothing
        listens, the host is refused, too."""
        for address in filter(_is_served, set(services) - self._given):
            self._given.add(address)
            listener = self._listen(address)
            self._listeners.append(listener)
            threading.Thread(target=_forward, args=(listener, address), daemon=True).start()

    def close(self) -> None:
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._metadata.shutdown()
        self._metadata.server_close()

    def _listen(self, address: Address) -> socket.socket:
        """A socket stays in the namespace that the thread was in when it made it."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._listen_inside, address).result()

    def _listen_inside(self, address: Address) -> socket.socket:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(self._namespace) as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        return socket.create_server(address, backlog=64)


def _is_served(address: Address) -> bool:
    try:
        socket.create_connection(address).close()
    except OSError:
        return False
    return True


def _forward(listener: socket.socket, address: Address) -> None:
    while True:
        try:
            inside, _ = listener.accept()
        except OSError:
            return  # closed
        try:
            outside = socket.create_connection(address)
        except OSError:
            inside.close()
            continue
        for source, target in ((inside, outside), (outside, inside)):
            threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(2**16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, target):
            each.close()


def _relay_to(url: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            headers = {name: value for name, value in self.headers.items() if name != "Host"}
            request = urllib.request.Request(
                url + self.path, self.rfile.read(size) or None, headers, method=self.command
            )
            try:
                answer = urllib.request.urlopen(request, timeout=900)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in ("content-length", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_POST = do_DELETE = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    return Handler
