"""The admission webhook's server: HTTPS, with certificates that are renewed while it runs."""

from __future__ import annotations

import json
import logging
import signal
import ssl
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.kubernetes.probes import ProbeServer, listen
from tpufleet.provisioner.kube import admission
from tpufleet.provisioner.kube.admission import AdmissionSettings

log = logging.getLogger(__name__)

LARGEST = 3 * 2**20  # what etcd would take, twice over
LOOK_EVERY = 10.0  # seconds; cert-manager renews days ahead


class WebhookServer:
    def __init__(self, address: str, certificates: Path, given: AdmissionSettings) -> None:
        """`certificates` holds tls.crt and tls.key, as cert-manager writes them."""
        self._certificates = certificates
        context, self._loaded = self._load()
        self._server = listen(_Server, address, _handler(given))
        self._server.context = context
        self.port = self._server.server_address[1]
        self._closing = threading.Event()

    def start(self) -> WebhookServer:
        for target in (self._server.serve_forever, self._renew):
            threading.Thread(target=target, daemon=True).start()
        return self

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def reload(self) -> bool:
        """Take new certificates if there are any; connections made from now on see them."""
        if self._stamp() == self._loaded:
            return False
        try:
            # Another one in its place: handshakes that are under way go on with the old.
            self._server.context, self._loaded = self._load()
        except BadInput as error:
            log.warning("%s; going on with the old ones", error)
            return False
        log.info("took new certificates")
        return True

    def _renew(self) -> None:
        while not self._closing.wait(LOOK_EVERY):
            self.reload()

    def _load(self) -> tuple[ssl.SSLContext, tuple[bytes, bytes]]:
        stamp = self._stamp()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._certificates / "tls.crt", self._certificates / "tls.key")
        except (OSError, ssl.SSLError) as error:
            raise BadInput(f"no usable certificates in {self._certificates}: {error}") from error
        return context, stamp

    def _stamp(self) -> tuple[bytes, bytes]:
        try:
            return (
                (self._certificates / "tls.crt").read_bytes(),
                (self._certificates / "tls.key").read_bytes(),
            )
        except OSError:
            return b"", b""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    context: ssl.SSLContext

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Handshakes happen in the connection's own thread: a slow one holds up nobody."""
        request.settimeout(10)
        try:
            wrapped = self.context.wrap_socket(request, server_side=True)
        except (ssl.SSLError, OSError) as error:
            log.debug("no handshake with %s: %s", client_address, error)
            return
        with wrapped:
            self.RequestHandlerClass(wrapped, client_address, self)


def _handler(given: AdmissionSettings) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            if self.path.partition("?")[0] != "/mutate" or not 0 < length <= LARGEST:
                self._say(404 if length <= LARGEST else 413, {"error": "POST a review to /mutate"})
                return
            try:
                said = admission.review_response(json.loads(self.rfile.read(length)), given)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                self._say(400, {"error": f"not an AdmissionReview: {error!r}"})
                return
            self._say(200, said)

        def _say(self, status: int, said: Any) -> None:
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    return Handler


def run(
    environ: Mapping[str, str],
    address: str,
    certificates: Path,
    probe_address: str,
    stopped: Callable[[], threading.Event] = threading.Event,
) -> int:
    """Until told to end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    stop = stopped()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    webhook = WebhookServer(address, certificates, admission.from_environ(environ)).start()
    fine = lambda: (200, "ok\n")
    probes = ProbeServer(probe_address, {"/healthz": fine, "/readyz": fine}).start()
    log.info("admitting Jobs on port %d", webhook.port)
    stop.wait()
    webhook.close()
    probes.close()
    return 0
