"""The admission webhook's HTTPS server."""

from __future__ import annotations

import json
import logging
import signal
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tpufleet.errors import unreadable
from tpufleet.kubernetes.probes import ProbeServer
from tpufleet.web_server import WebServer, listen
from tpufleet_gke.provisioner.kube import admission
from tpufleet_gke.provisioner.kube.admission import AdmissionSettings
from tpufleet_gke.provisioner.settings import from_variables

log = logging.getLogger(__name__)

MAX_REVIEW_BYTES = 3 * 2**20  # twice what etcd accepts for one object
SHUTDOWN_TIMEOUT = 5  # seconds for requests in progress


class WebhookServer:
    def __init__(self, address: str, certificates: Path, settings: AdmissionSettings) -> None:
        """`certificates` is a folder with tls.crt and tls.key, as cert-manager writes them."""
        config = uvicorn.Config(
            create_app(settings),
            loop="asyncio",
            access_log=False,
            log_config=None,
            lifespan="off",
            server_header=False,
            ssl_certfile=certificates / "tls.crt",
            ssl_keyfile=certificates / "tls.key",
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise unreadable(f"tls.crt and tls.key in {certificates}", error) from error
        self._socket = listen(address)
        self.port = self._socket.getsockname()[1]
        self._server = WebServer(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="webhook", daemon=True
        )

    def start(self) -> WebhookServer:
        self._thread.start()
        return self

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


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
