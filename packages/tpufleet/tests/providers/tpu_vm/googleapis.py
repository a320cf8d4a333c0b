"""https://*.googleapis.com on this machine, for Google's own client: an egress proxy that answers
itself, with a certificate that the client is told to trust. The tokens are made up; the other
answers are those of the emulated project."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from tpufleet.providers.tpu_vm.google_rest import HOSTS
from tpufleet_testbed.cloud_tpu.project_api import ProjectApi

TOKENS = "oauth2.googleapis.com"
APIS = {url.removeprefix("https://"): api for api, url in HOSTS.items()}


@dataclass(frozen=True)
class Received:
    api: str
    path: str
    headers: Mapping[str, str]


class GoogleApis:
    def __init__(self, folder: Path) -> None:
        self.project = ProjectApi()
        self.requests: list[Received] = []
        self.token_error = ""  # of OAuth 2.0, such as invalid_grant
        self.certificate, key = _certificate(folder)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate, key)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def environ(self) -> dict[str, str]:
        return {
            "HTTPS_PROXY": f"http://127.0.0.1:{self._server.server_port}",
            "NO_PROXY": "",
            "no_proxy": "",
            "REQUESTS_CA_BUNDLE": str(self.certificate),
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.project.close()

    def _answer(
        self, host: str, target: str, method: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, Any]]:
        if host == TOKENS:
            if self.token_error:
                return 400, {"error": self.token_error, "error_description": "Bad Request"}
            assert parse_qs(body.decode())["grant_type"]
            return 200, {"access_token": "t", "expires_in": 3600, "token_type": "Bearer"}
        api = APIS[host]
        self.requests.append(Received(api, target, headers))
        if headers["authorization"] != "Bearer t":
            return 401, {"error": {"code": 401, "message": "invalid credentials"}}
        return self.project.answer(f"/{api}{target}", json.loads(body or b"{}"), method)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        apis = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            host = ""

            def do_CONNECT(self) -> None:
                self.host = self.path.rpartition(":")[0]
                self.send_response(200)
                self.end_headers()
                self.connection = apis._context.wrap_socket(self.connection, server_side=True)
                self.rfile = self.connection.makefile("rb")
                self.wfile = self.connection.makefile("wb", buffering=0)  # type: ignore[assignment]
                self.close_connection = False

            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                headers = {name.lower(): value for name, value in self.headers.items()}
                status, content = apis._answer(
                    self.host, self.path, self.command, self.rfile.read(length), headers
                )
                payload = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """Not logged."""

        return Handler


def _certificate(folder: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl program to make a certificate with")
    cert, key = folder / "googleapis.pem", folder / "googleapis.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=googleapis", "-addext",
         "subjectAltName=DNS:*.googleapis.com", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key
