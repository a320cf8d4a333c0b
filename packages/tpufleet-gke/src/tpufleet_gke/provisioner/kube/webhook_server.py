"""The admission webhook's HTTPS server. Certificates are reloaded while it runs."""

from __future__ import annotations

import json
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tpufleet.errors import BadInput, cannot_listen, invalid, unreadable
from tpufleet.kubernetes.probes import ProbeServer
from tpufleet_gke.provisioner.kube import admission
from tpufleet_gke.provisioner.kube.admission import AdmissionSettings
from tpufleet_gke.provisioner.settings import from_variables

log = logging.getLogger(__name__)

MAX_REVIEW_BYTES = 3 * 2**20  # twice what etcd accepts for one object
RELOAD_INTERVAL = 10.0  # seconds; cert-manager renews days before expiry
SHUTDOWN_TIMEOUT = 5  # seconds for requests in progress


class WebhookServer:
    def __init__(self, address: str, certificates: Path, settings: AdmissionSettings) -> None:
        """`certificates` is a folder with tls.crt and tls.key, as cert-manager writes them."""
        self._certificate, self._key = certificates / "tls.crt", certificates / "tls.key"
        self._loaded = self._read_files()
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        self._socket = _bind(address)
        self.port = self._socket.getsockname()[1]
        self._config = self._server_config(settings)
        self._server = uvicorn.Server(self._config)
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("webhook", self._serve), ("certificates", self._watch_files))
        ]

    def start(self) -> WebhookServer:
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        self._closing.set()
        self._server.should_exit = True
        for thread in self._threads:
            thread.join()
        self._socket.close()

    def reload(self) -> bool:
        """Load the certificates if the files changed. New connections use them."""
        contents = self._read_files()
        if contents == self._loaded:
            return False
        try:
            # First into another context: a key that does not fit would break the one in use.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            assert self._config.ssl is not None
            self._load(self._config.ssl)
        except BadInput as error:
            log.warning("%s; keeping the previous certificates", error)
            return False
        self._loaded = contents
        return True

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])

    def _watch_files(self) -> None:
        while not self._closing.wait(RELOAD_INTERVAL):
            self.reload()

    def _server_config(self, settings: AdmissionSettings) -> uvicorn.Config:
        config = uvicorn.Config(
            create_app(settings),
            loop="asyncio",
            access_log=False,
            log_config=None,
            lifespan="off",
            server_header=False,
            ssl_certfile=self._certificate,
            ssl_keyfile=str(self._key),
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
        )
        config.load()
        assert config.ssl is not None
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
        return config

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._certificate, self._key)
        except (OSError, ssl.SSLError) as error:
            folder = self._certificate.parent
            raise unreadable(f"tls.crt and tls.key in {folder}", error) from error

    def _read_files(self) -> tuple[bytes, bytes]:
        try:
            return self._certificate.read_bytes(), self._key.read_bytes()
        except OSError:
            return b"", b""


def create_app(settings: AdmissionSettings) -> Starlette:
    async def mutate(request: Request) -> JSONResponse:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_REVIEW_BYTES:
                message = f"the AdmissionReview is larger than {MAX_REVIEW_BYTES} bytes"
                return JSONResponse({"error": message}, status_code=413)
        try:
            return JSONResponse(admission.review_response(json.loads(body), settings))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"not an AdmissionReview: {error!r}"
            return JSONResponse({"error": message}, status_code=400)

    return Starlette(routes=[Route("/mutate", mutate, methods=["POST"])])


def _bind(address: str) -> socket.socket:
    """A socket bound to `HOST:PORT`, or to `:PORT` on all interfaces."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise invalid(address, "HOST:PORT or :PORT", ":5000")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets whose protocol is explicit.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), int(port)))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        raise cannot_listen(address, error) from error
    return listener


def run(
    environ: Mapping[str, str],
    address: str,
    certificates: Path,
    probe_address: str,
) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    webhook = WebhookServer(
        address, certificates, from_variables(AdmissionSettings, environ)
    ).start()
    healthy = lambda: (200, "ok\n")
    probes = ProbeServer(probe_address, {"/healthz": healthy, "/readyz": healthy}).start()
    log.info("admission webhook on port %d", webhook.port)
    stop.wait()
    webhook.close()
    probes.close()
    return 0
