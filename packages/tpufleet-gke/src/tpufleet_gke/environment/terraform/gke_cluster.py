"""Stage 1, cluster: the GKE control plane, the service account of nodes, and the outputs."""

from __future__ import annotations

from typing import Any

from tpufleet.model.tpu.type_lookup import short_name
from tpufleet_gke.environment.config import capacity, names
from tpufleet_gke.environment.config.sections import Environment
from tpufleet_gke.environment.terraform import network
from tpufleet_gke.environment.terraform.hcl import (
    Block,
    Expression,
    Nested,
    output,
    project_roles,
    reference,
    resource,
)


def resources(environment: Environment) -> list[Block]:
    return [*_node_account(environment), _cluster(environment)]


def node_account_email() -> Expression:
    return reference("google_service_account", "nodes", "email")


def _node_account(environment: Environment) -> list[Block]:
    member = reference("google_service_account", "nodes", "member")
    return [
        resource(
            "google_service_account", "nodes", project=environment.project,
            account_id=names.node_account(environment),
            display_name=f"{environment.name}: nodes of GKE",
        ),
        *project_roles(environment.project, "nodes", member, environment.nodes.roles),
    ]  # fmt: skip


def _cluster(environment: Environment) -> Block:
    settings, links = environment.cluster, environment.network
    body: dict[str, Any] = {
        "project": environment.project,
        "name": names.cluster(environment),
        "description": settings.description,
        "location": environment.region,
        "node_locations": list(environment.zones),
        "network": network.network_id(environment),
        "subnetwork": network.subnetwork_id(environment),
        "networking_mode": "VPC_NATIVE",
        "datapath_provider": "ADVANCED_DATAPATH",
        "default_max_pods_per_node": capacity.PODS_PER_CPU_NODE,
        "min_master_version": settings.version or None,
        "deletion_protection": environment.deletion_protection,
        "initial_node_count": 1,
        "remove_default_node_pool": True,
        "node_config": Nested(service_account=node_account_email()),
        "ip_allocation_policy": Nested(
            cluster_secondary_range_name=names.pods_range(environment),
            services_secondary_range_name=names.services_range(environment),
        ),
        "release_channel": Nested(channel=settings.channel),
        "workload_identity_config": Nested(workload_pool=names.workload_pool(environment)),
        "addons_config": Nested(
            gcs_fuse_csi_driver_config=Nested(enabled=settings.gcs_fuse),
            gce_persistent_disk_csi_driver_config=Nested(enabled=settings.persistent_disk),
        ),
        "logging_config": Nested(enable_components=list(settings.logging)),
        "monitoring_config": Nested(
            enable_components=["SYSTEM_COMPONENTS"],
            managed_prometheus=Nested(enabled=settings.managed_prometheus),
        ),
        "timeouts": Nested(create="60m", update="60m", delete="60m"),
        # Of the default pool, which is removed.
        "lifecycle": Nested(ignore_changes=[Expression("node_config"), Expression("node_version")]),
    }
    if links.private_nodes:
        body["private_cluster_config"] = Nested(
            enable_private_nodes=True,
            enable_private_endpoint=links.private_endpoint,
            master_ipv4_cidr_block=links.control_plane,
        )
    if links.authorized_networks or links.private_endpoint:  # a private endpoint requires it
        blocks = [
            Nested(display_name=name, cidr_block=cidr)
            for name, cidr in links.authorized_networks.items()
        ]
        listed = Nested(cidr_blocks=blocks) if blocks else Nested()
        body["master_authorized_networks_config"] = listed
    if settings.cloud_dns:
        body["dns_config"] = Nested(
            cluster_dns="CLOUD_DNS",
            cluster_dns_scope="CLUSTER_SCOPE",
            cluster_dns_domain="cluster.local",
        )
    return resource("google_container_cluster", "cluster", **body)


def outputs(environment: Environment) -> list[Block]:
    cluster = "google_container_cluster"
    buckets = {
        name: reference("google_storage_bucket", name, "name") for name in environment.buckets
    }
    slices = {
        short_name(kind): count for kind, count in capacity.slices_by_type(environment).items()
    }
    board: Any = ""
    if environment.tensorboard is not None:
        board = reference("google_vertex_ai_tensorboard", "tensorboard", "name")
    return [
        output("cluster_name", reference(cluster, "cluster", "name"), "Name of the cluster."),
        output("cluster_region", reference(cluster, "cluster", "location"), "Its region."),
        output("node_pool_sa_email", node_account_email(), "Service account of nodes."),
        output("gcs_buckets", buckets, "Buckets by their name in cluster.yaml."),
        output("artifact_registry_image_path", names.image_path(environment), "Prefix of images."),
        output("tensorboard_id", board, "Vertex AI TensorBoard, or empty."),
        output("tpu_slices", slices, "Slices by TPU type, which quotas are derived from."),
    ]
