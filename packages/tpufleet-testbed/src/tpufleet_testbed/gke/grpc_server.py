"""The emulated GKE API over gRPC, for Google's own client."""

from __future__ import annotations

from typing import Any

import grpc
from google.cloud import container_v1 as api

from tpufleet_testbed import servers
from tpufleet_testbed.gke.node_pools import GkeEmulator, parse_pool_name

SERVICE = "google.container.v1.ClusterManager"


class GkeServer(servers.GrpcServer):
    def __init__(self, gke: GkeEmulator, address: str = "127.0.0.1:0") -> None:
        super().__init__([_service(gke)], address, gke.advance)


def client(address: str) -> Any:
    """Google's own client, connected to an emulator."""
    from google.cloud.container_v1.services.cluster_manager.transports import (
        ClusterManagerGrpcTransport,
    )

    transport = ClusterManagerGrpcTransport(channel=grpc.insecure_channel(address))
    return api.ClusterManagerClient(transport=transport)


def _service(gke: GkeEmulator) -> grpc.GenericRpcHandler:
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

    methods: dict[str, tuple[Any, servers.Call]] = {
        "ListNodePools": (api.ListNodePoolsRequest, list_pools),
        "GetNodePool": (api.GetNodePoolRequest, lambda request: gke.get_pool(pool(request)[1])),
        "CreateNodePool": (
            api.CreateNodePoolRequest,
            lambda request: gke.create(cluster(request, request.parent), request.node_pool),
        ),
        "DeleteNodePool": (
            api.DeleteNodePoolRequest, lambda request: gke.delete(*pool(request)),
        ),
        "UpdateNodePool": (
            api.UpdateNodePoolRequest,
            lambda request: gke.update(*pool(request), dict(request.labels.labels)),
        ),
        "GetCluster": (api.GetClusterRequest, get_cluster),
        "ListOperations": (api.ListOperationsRequest, lambda _: gke.list_operations()),
        "GetOperation": (
            api.GetOperationRequest,
            lambda request: gke.get_operation(request.name.rpartition("/")[2]),
        ),
    }  # fmt: skip
    return servers.grpc_service(SERVICE, methods)
