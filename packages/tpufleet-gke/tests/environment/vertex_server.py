"""A fake of Vertex AI's TensorBoard and Metadata services, over gRPC with TLS, behind a proxy.

Written from https://cloud.google.com/vertex-ai/docs/reference/rpc/google.cloud.aiplatform.v1 . It
runs with the Python that has Google's client: `python vertex_server.py FOLDER`. It writes the CA
and the address of the proxy to FOLDER, and what it was sent to FOLDER/calls.jsonl.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.cloud import aiplatform_v1 as api

HOST = "us-central1-aiplatform.googleapis.com"
TENSORBOARD = "projects/p/locations/us-central1/tensorboards/123"
STORE = "projects/p/locations/us-central1/metadataStores/default"
BLOBS = "cloud-ai-platform-blobs/tensorboard-123"
COLLECTIONS = {
    "TensorboardExperiment": "experiments",
    "TensorboardRun": "runs",
    "TensorboardTimeSeries": "timeSeries",
    "Context": "contexts",
    "Artifact": "artifacts",
    "Execution": "executions",
}
# "This value should be 1-128 characters, and valid characters are /[a-z][0-9]-/."
TENSORBOARD_ID = re.compile(r"[a-z0-9-]{1,128}")


class Refusal(Exception):
    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class VertexState:
    """Resources by name; the standard methods of Google's API design guide."""

    def __init__(self) -> None:
        self.resources: dict[str, Any] = {
            TENSORBOARD: api.Tensorboard(
                name=TENSORBOARD, display_name="TPU Training", blob_storage_path_prefix=BLOBS
            ),
            STORE: api.MetadataStore(name=STORE),
        }
        self.lock = threading.Lock()

    def answer(self, method: str, request: Any) -> Any:
        with self.lock:
            standard = re.match(r"(Get|Create|Update|List)(\w+)", method)
            verb, kind = standard.groups() if standard else ("", method)
            match verb:
                case "Get":
                    return self._get(request.name)
                case "Create":
                    return self._create(kind, request.parent, request)
                case "Update":
                    return self._update(kind, request)
                case "List":
                    return self._list(kind, request)
            custom: Callable[[Any], Any] | None = getattr(self, f"_{_snake(method)}", None)
            if custom is None:
                raise Refusal(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not faked")
            return custom(request)

    def _get(self, name: str) -> Any:
        if name not in self.resources:
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"{name} is not found.")
        return self.resources[name]

    def _create(self, kind: str, parent: str, request: Any) -> Any:
        self._get(parent)
        field = _snake(kind)
        identifier = getattr(request, f"{field}_id", "") or str(1000 + len(self.resources))
        if kind.startswith("Tensorboard") and not TENSORBOARD_ID.fullmatch(identifier):
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"{identifier} is not a valid id")
        name = f"{parent}/{COLLECTIONS[kind]}/{identifier}"
        if name in self.resources:
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, f"{name} already exists.")
        resource = type(getattr(request, field))(getattr(request, field))
        resource.name = name
        self.resources[name] = resource
        return resource

    def _update(self, kind: str, request: Any) -> Any:
        resource = getattr(request, _snake(kind))
        self._get(resource.name)
        self.resources[resource.name] = type(resource)(resource)
        return self.resources[resource.name]

    def _list(self, kind: str, request: Any) -> Any:
        single = {"TensorboardTimeSeries": kind}.get(kind, kind.removesuffix("s"))
        prefix = f"{request.parent}/{COLLECTIONS[single]}/"
        found = [one for name, one in self.resources.items() if name.startswith(prefix)]
        shown = re.search(r'display_name ?= ?"([^"]*)"', getattr(request, "filter", ""))
        if shown:
            found = [one for one in found if one.display_name == shown[1]]
        response = getattr(api, f"List{kind}Response")
        return response(**{_snake(kind): found})

    def _batch_create_tensorboard_time_series(self, request: Any) -> Any:
        made = [self._create("TensorboardTimeSeries", one.parent, one) for one in request.requests]
        return api.BatchCreateTensorboardTimeSeriesResponse(tensorboard_time_series=made)

    def _write_tensorboard_experiment_data(self, request: Any) -> Any:
        self._get(request.tensorboard_experiment)
        for run in request.write_run_data_requests:
            self._check_series(run)
        return api.WriteTensorboardExperimentDataResponse()

    def _write_tensorboard_run_data(self, request: Any) -> Any:
        self._check_series(request)
        return api.WriteTensorboardRunDataResponse()

    def _check_series(self, run: Any) -> None:
        self._get(run.tensorboard_run)
        for series in run.time_series_data:
            known = self._get(
                f"{run.tensorboard_run}/timeSeries/{series.tensorboard_time_series_id}"
            )
            if known.value_type != series.value_type:
                raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "another type of values")

    def _add_context_artifacts_and_executions(self, request: Any) -> Any:
        self._get(request.context)
        return api.AddContextArtifactsAndExecutionsResponse()

    def _add_context_children(self, request: Any) -> Any:
        self._get(request.context)
        return api.AddContextChildrenResponse()


class Handler(grpc.GenericRpcHandler):
    def __init__(self, state: VertexState, calls: Path) -> None:
        self._state, self._calls = state, calls

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = details.method.rpartition("/")[2]
        authorized = "authorization" in dict(details.invocation_metadata)
        kind = getattr(api, f"{method}Request")

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            error = ""
            try:
                if not authorized:
                    raise Refusal(grpc.StatusCode.UNAUTHENTICATED, "no credentials")
                return self._state.answer(method, request)
            except Refusal as refusal:
                error = f"{refusal.code.name}: {refusal}"
                context.abort(refusal.code, str(refusal))
            finally:
                line = {"method": method, "error": error, "request": kind.to_dict(request)}
                with self._calls.open("a") as file:
                    file.write(json.dumps(line, default=str) + "\n")

        return grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=kind.deserialize,
            response_serializer=lambda response: type(response).serialize(response),
        )


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def certificate(folder: Path) -> tuple[bytes, bytes]:
    """For the host of the API, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    chain = built.public_bytes(serialization.Encoding.PEM)
    (folder / "ca.pem").write_bytes(chain)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, chain


def serve_proxy(target: int) -> int:
    """An HTTP proxy whose CONNECT leads to the fake, whatever the host."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other direction was closed
            while data := source.recv(65536):
                sink.sendall(data)
        sink.close()

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(65536)
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            server = socket.create_connection(("127.0.0.1", target))
            for pair in ((client, server), (server, client)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def main() -> None:
    folder = Path(sys.argv[1])
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((Handler(VertexState(), folder / "calls.jsonl"),))
    credentials = grpc.ssl_server_credentials([certificate(folder)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    (folder / "proxy.new").write_text(f"http://127.0.0.1:{serve_proxy(port)}")
    (folder / "proxy.new").rename(folder / "proxy")
    server.wait_for_termination()


if __name__ == "__main__":
    main()
