"""The emulated GKE API over gRPC, for Google's own client."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.cloud import container_v1 as api

from tpufleet_testbed.gke.node_pools import GkeApiError, GkeEmulator, parse_pool_name

log = logging.getLogger(__name__)

SERVICE = "google.container.v1.ClusterManager"
POLL_SECONDS = 0.2  # seconds


class GkeServer:
    def __init__(self, gke: GkeEmulator, address: str = "127.0.0.1:0") -> None:
        self._gke = gke
        self._server = grpc.server(ThreadPoolExecutor(16, thread_name_prefix="gke"))
        self._server.add_generic_rpc_handlers((_handlers(gke),))
        port = self._server.add_insecure_port(address)
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="gke-emulator", daemon=True)

    def start(self) -> GkeServer:
        self._server.start()
        self._thread.start()
        return self

    def close(self) -> None:
        self._closing.set()
        self._server.stop(grace=0.5).wait()

    def _tick(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            try:
                self._gke.advance()
            except Exception:
                log.exception("unexpected error in the GKE emulator loop; continuing")


def client(address: str) -> Any:
    """Google's own client, connected to an emulator."""
    from google.cloud.container_v1.services.cluster_manager.transports import (
        ClusterManagerGrpcTransport,
    )

    transport = ClusterManagerGrpcTransport(channel=grpc.insecure_channel(address))
    return api.ClusterManagerClient(transport=transport)


def _handlers(gke: GkeEmulator) -> grpc.GenericRpcHandler:
    def cluster(request: Any, name: str) -> str:
        """Of a request, also of one with the deprecated fields."""
        parent = name or (
            f"projects/{request.project_id}/locations/{request.zone}/clusters/{request.cluster_id}"
        )
        gke.check_cluster(parent)
        return parent

    def pool(request: Any) -> tuple[str, str]:
        if not request.name:
            return cluster(request, ""), str(request.node_pool_id)
        parent, name = parse_pool_name(request.name)
        return cluster(request, parent), name

    def list_pools(request: Any) -> Any:
        cluster(request, request.parent)
        return gke.list_pools()

    def get_cluster(request: Any) -> Any:
        cluster(request, request.name)
        return gke.get_cluster()

    methods: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
        "ListNodePools": (list_pools, api.ListNodePoolsRequest, api.ListNodePoolsResponse),
        "GetNodePool": (
            lambda request: gke.get_pool(pool(request)[1]), api.GetNodePoolRequest, api.NodePool,
        ),
        "CreateNodePool": (
            lambda request: gke.create(cluster(request, request.parent), request.node_pool),
            api.CreateNodePoolRequest, api.Operation,
        ),
        "DeleteNodePool": (
            lambda request: gke.delete(*pool(request)), api.DeleteNodePoolRequest, api.Operation,
        ),
        "UpdateNodePool": (
            lambda request: gke.update(*pool(request), dict(request.labels.labels)),
            api.UpdateNodePoolRequest, api.Operation,
        ),
        "GetCluster": (get_cluster, api.GetClusterRequest, api.Cluster),
        "ListOperations": (
            lambda _: gke.list_operations(), api.ListOperationsRequest, api.ListOperationsResponse,
        ),
        "GetOperation": (
            lambda request: gke.get_operation(request.name.rpartition("/")[2]),
            api.GetOperationRequest, api.Operation,
        ),
    }  # fmt: skip
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            name: grpc.unary_unary_rpc_method_handler(
                _wrap(call),
                request_deserializer=request.deserialize,
                response_serializer=response.serialize,
            )
            for name, (call, request, response) in methods.items()
        },
    )


def _wrap(call: Callable[[Any], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
    def handle(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return call(request)
        except GkeApiError as error:
            return context.abort(grpc.StatusCode[error.code], error.message)

    return handle
