"""The gRPC and HTTP servers of all emulators."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc

from tpufleet.errors import BadInput, cannot_listen, unexpected

log = logging.getLogger(__name__)

TICK_SECONDS = 0.2
SHUTDOWN_POLL_SECONDS = 0.02  # how soon a server notices that it is to end; the default is 0.5

Call = Callable[[Any], Any]
Answer = tuple[int, Mapping[str, str], bytes]  # status, headers, body


class ApiError(Exception):
    """An error response of an emulated API."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        reason: str = "",  # of the ErrorInfo that Google adds to some, as the next two
        domain: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.reason = code, message, reason
        self.domain, self.metadata = domain, dict(metadata or {})

    @property
    def number(self) -> int:
        return int(self.code.value[0])


def grpc_service(name: str, methods: Mapping[str, tuple[Any, Call]]) -> grpc.GenericRpcHandler:
    """Each method with the type of its request, of proto-plus or plain protocol buffers; None: the
    bytes as they are. An ApiError or BadInput that it raises is the answer."""
    return grpc.method_handlers_generic_handler(
        name,
        {
            method: grpc.unary_unary_rpc_method_handler(
                _handler(call),
                request_deserializer=getattr(request, "deserialize", None)
                or getattr(request, "FromString", None),
                response_serializer=_serialize,
            )
            for method, (request, call) in methods.items()
        },
    )


def _handler(call: Call) -> Callable[[Any, grpc.ServicerContext], Any]:
    def handle(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return call(request)
        except ApiError as error:
            if error.reason:
                context.set_trailing_metadata((("grpc-status-details-bin", _error_info(error)),))
            context.abort(error.code, error.message)
        except BadInput as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return handle


def _error_info(error: ApiError) -> bytes:
    from google.protobuf import any_pb2
    from google.rpc import error_details_pb2, status_pb2

    packed = any_pb2.Any()
    packed.Pack(
        error_details_pb2.ErrorInfo(
            reason=error.reason, domain=error.domain, metadata=error.metadata
        )
    )
    status = status_pb2.Status(code=error.number, message=error.message, details=[packed])
    return status.SerializeToString()


def _serialize(message: Any) -> bytes:
    if isinstance(message, bytes):
        return message
    kind = type(message)
    return kind.serialize(message) if hasattr(kind, "serialize") else message.SerializeToString()


class GrpcServer:
    """`tick` is called a few times each second, as long as the server runs."""

    def __init__(
        self,
        services: Sequence[grpc.GenericRpcHandler],
        address: str = "127.0.0.1:0",
        tick: Callable[[], None] | None = None,
    ) -> None:
        executor = ThreadPoolExecutor(64, thread_name_prefix="emulator")
        self._server = grpc.server(executor, services, options=[("grpc.so_reuseport", 0)])
        host, _, port = address.rpartition(":")
        try:
            # Checked first, because gRPC would log its own, longer error.
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            socket.create_server((host.strip("[]"), int(port)), family=family).close()
            self.address = f"{host}:{self._server.add_insecure_port(address)}"
        except (OSError, RuntimeError) as error:
            raise cannot_listen(address, error) from error
        self._closing = threading.Event()
        self._tick = tick
        self._thread = threading.Thread(target=self._run, name="emulator", daemon=True)

    def start(self) -> GrpcServer:
        self._server.start()
        self._thread.start()
        return self

    def close(self) -> None:
        self._closing.set()
        self._server.stop(grace=0.5).wait()
        self._thread.join()

    def _run(self) -> None:
        while self._tick is not None and not self._closing.wait(TICK_SECONDS):
            try:
                self._tick()
            except Exception:
                log.exception(unexpected("running the emulator loop"))


FROM_A_PAGE: Answer = (403, {"Content-Type": "text/plain"}, b"not for web pages")


class HttpServer:
    """`answer` gets the method, path and query, headers by lower-case name, and body."""

    def __init__(
        self,
        answer: Callable[[str, str, Mapping[str, str], bytes], Answer],
        address: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self._server = ThreadingHTTPServer(address, _http_handler(answer))
        self._server.daemon_threads = True
        self.url = f"http://{address[0]}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(SHUTDOWN_POLL_SECONDS,), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _http_handler(
    answer: Callable[[str, str, Mapping[str, str], bytes], Answer],
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                received = {name.lower(): value for name, value in self.headers.items()}
                if "origin" in received:  # a page in a browser must not start agents here
                    status, headers, payload = FROM_A_PAGE
                else:
                    status, headers, payload = answer(self.command, self.path, received, body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)
            except ConnectionError:  # the client ended while it waited
                self.close_connection = True

        do_PATCH = do_PUT = do_POST = do_DELETE = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Not logged: hosts poll all the time."""

    return Handler
