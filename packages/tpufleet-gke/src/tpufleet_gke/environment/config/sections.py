"""The sections of cluster.yaml. Each field is declared once, here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpufleet_gke.environment.config.field_kinds import (
    ACCELERATOR,
    BOOLEAN,
    BUCKET,
    IMAGE,
    LABELS,
    LOCATION,
    MACHINE_TYPE,
    NAME,
    NETWORK_RANGE,
    NUMBER,
    PROJECT,
    REGION,
    RESOURCE_LABELS,
    ROLE,
    SERVICE,
    SERVICE_ACCOUNT,
    SHORT_NAME,
    TAINT_EFFECTS,
    TEXT,
    VERSION,
    ZONE,
    choice,
    counted,
    list_of,
    mapping_of,
    option,
    section,
)

# What pods of jobs and of the environment need of a node; buckets are granted one by one.
NODE_ROLES = (
    "roles/logging.logWriter",
    "roles/monitoring.metricWriter",
    "roles/monitoring.viewer",
    "roles/stackdriver.resourceMetadata.writer",
    "roles/artifactregistry.reader",
)  # https://cloud.google.com/kubernetes-engine/docs/how-to/service-accounts#minimum-permissions
SERVICES = (
    "artifactregistry.googleapis.com", "cloudbuild.googleapis.com",
    "cloudresourcemanager.googleapis.com", "compute.googleapis.com", "container.googleapis.com",
    "iam.googleapis.com", "iamcredentials.googleapis.com", "serviceusage.googleapis.com",
    "storage.googleapis.com", "sts.googleapis.com", "tpu.googleapis.com",
)  # fmt: skip
AUTOMATION_ROLES = (
    "roles/artifactregistry.admin",
    "roles/compute.networkAdmin",
    "roles/container.admin",
    "roles/iam.roleAdmin",
    "roles/iam.serviceAccountAdmin",
    "roles/iam.serviceAccountUser",
    "roles/logging.logWriter",
    "roles/resourcemanager.projectIamAdmin",
    "roles/serviceusage.serviceUsageConsumer",
    "roles/storage.admin",
)
CHANNELS = ("RAPID", "REGULAR", "STABLE", "EXTENDED")
# https://cloud.google.com/kubernetes-engine/docs/concepts/about-logs
LOG_COMPONENTS = (
    "SYSTEM_COMPONENTS", "WORKLOADS", "APISERVER", "CONTROLLER_MANAGER", "SCHEDULER",
)  # fmt: skip
CAPACITIES = ("on-demand", "spot", "reserved", "flex-start")
STORAGE_CLASSES = ("STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE")
# https://cloud.google.com/kubernetes-engine/docs/concepts/release-channels
AUTO_UPGRADE = "Upgrade nodes automatically. GKE refuses false: the cluster is in a channel."
DISK_TYPES = ("pd-standard", "pd-balanced", "pd-ssd", "hyperdisk-balanced")


@dataclass(frozen=True, kw_only=True, slots=True)
class Taint:
    key: str = option(TEXT, "Key of the taint.", example="dedicated")
    value: str = option(TEXT, "Value of the taint.", default="true")
    effect: str = option(choice(*TAINT_EFFECTS), "Effect.", default="NO_SCHEDULE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Automation:
    """Created by the first stage; the other stages run as its service account."""

    bucket: str = option(
        BUCKET, "Bucket of Terraform state and outputs (default: PROJECT-NAME-automation).",
        default="",
    )  # fmt: skip
    location: str = option(LOCATION, "Location of the bucket (default: the region).", default="")
    create_bucket: bool = option(BOOLEAN, "Create the bucket.", default=True)
    service_account: str = option(
        SERVICE_ACCOUNT, "Service account that applies the other stages.", default="tpu-automation"
    )
    create_service_account: bool = option(BOOLEAN, "Create the service account.", default=True)
    roles: tuple[str, ...] = option(
        list_of(ROLE), "Roles of the service account on the project.", default=AUTOMATION_ROLES
    )
    enable_apis: bool = option(BOOLEAN, "Enable the Google APIs.", default=True)
    services: tuple[str, ...] = option(
        list_of(SERVICE), "Google APIs to enable besides those that the environment needs.",
        default=(),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ExistingNetwork:
    """A VPC that exists, in this project or, as a Shared VPC, in a host project."""

    host_project: str = option(PROJECT, "Host project of a Shared VPC.", default="")
    network: str = option(TEXT, "Name of the network.", example="shared-vpc")
    subnetwork: str = option(TEXT, "Name of the subnetwork, in the region.", example="gke-nodes")
    pods_range: str = option(TEXT, "Name of its secondary range for pods.", example="pods")
    services_range: str = option(TEXT, "Name of its secondary range for services.", example="svc")


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    existing: ExistingNetwork | None = option(
        section(ExistingNetwork), "Use this VPC instead of creating one.", default=None
    )
    nodes: str = option(NETWORK_RANGE, "Range of nodes.", default="10.0.0.0/18")
    pods: str = option(
        NETWORK_RANGE, "Range of pods (default: sized from the node pools).", default=""
    )
    services: str = option(NETWORK_RANGE, "Range of services.", default="10.64.0.0/20")
    control_plane: str = option(
        NETWORK_RANGE, "Range of the control plane, a /28.", default="172.16.0.0/28"
    )
    private_nodes: bool = option(BOOLEAN, "Nodes have no public addresses.", default=True)
    private_endpoint: bool = option(
        BOOLEAN, "The control plane has no public address.", default=False
    )
    nat: bool = option(BOOLEAN, "Create Cloud NAT, for private nodes to reach out.", default=True)
    authorized_networks: Mapping[str, str] = option(
        mapping_of(NAME, NETWORK_RANGE), "Ranges that may reach the control plane, by name.",
        factory=dict,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    name: str = option(NAME, "Name of the cluster (default: NAME-cluster).", default="")
    channel: str = option(choice(*CHANNELS), "Release channel.", default="REGULAR")
    version: str = option(
        VERSION, "Minimum version of the control plane (default: the channel's).", default=""
    )
    description: str = option(TEXT, "Description.", default="JAX training on TPUs")
    logging: tuple[str, ...] = option(
        list_of(choice(*LOG_COMPONENTS)), "Components whose logs are collected.",
        default=("SYSTEM_COMPONENTS", "WORKLOADS"),
    )  # fmt: skip
    managed_prometheus: bool = option(BOOLEAN, "Managed Service for Prometheus.", default=True)
    gcs_fuse: bool = option(BOOLEAN, "Cloud Storage FUSE CSI driver.", default=True)
    persistent_disk: bool = option(BOOLEAN, "Persistent Disk CSI driver.", default=True)
    cloud_dns: bool = option(BOOLEAN, "Cloud DNS for names in the cluster.", default=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDefaults:
    service_account: str = option(
        SERVICE_ACCOUNT, "Service account of all nodes.", default="gke-nodes"
    )
    roles: tuple[str, ...] = option(
        list_of(ROLE), "Its roles on the project; buckets are granted separately.",
        default=NODE_ROLES,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuPool:
    machine_type: str = option(MACHINE_TYPE, "Machine type.", default="n2-standard-8")
    min_nodes: int = option(counted(0, 1000), "Fewest nodes, over all zones.", default=1)
    max_nodes: int = option(counted(1, 1000), "Most nodes, over all zones.", default=5)
    zones: tuple[str, ...] = option(list_of(ZONE), "Zones (default: zones).", default=())
    disk_type: str = option(choice(*DISK_TYPES), "Boot disk type.", default="pd-balanced")
    disk_gb: int = option(counted(20, 65536), "Boot disk size in GB.", default=100)
    spot: bool = option(BOOLEAN, "Spot VMs.", default=False)
    image_type: str = option(TEXT, "Node image.", default="COS_CONTAINERD")
    image_streaming: bool = option(BOOLEAN, "Image streaming (gcfs).", default=True)
    gvnic: bool = option(BOOLEAN, "Google Virtual NIC.", default=True)
    auto_repair: bool = option(BOOLEAN, "Repair nodes automatically.", default=True)
    auto_upgrade: bool = option(BOOLEAN, AUTO_UPGRADE, default=True)
    labels: Mapping[str, str] = option(LABELS, "Kubernetes labels of nodes.", factory=dict)
    taints: tuple[Taint, ...] = option(list_of(section(Taint)), "Taints of nodes.", default=())


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPool(CpuPool):
    machine_type: str = option(MACHINE_TYPE, "Machine type.", default="g2-standard-12")
    min_nodes: int = option(counted(0, 1000), "Fewest nodes, over all zones.", default=0)
    max_nodes: int = option(counted(1, 1000), "Most nodes, over all zones.", default=1)
    accelerator: str = option(TEXT, "GPU type.", default="nvidia-l4")
    accelerator_count: int = option(counted(1, 16), "GPUs per node.", default=1)
    local_ssds: int = option(counted(0, 32), "Local SSDs per node.", default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TpuPool:
    type: str = option(ACCELERATOR, "TPU type, as `tpu types` lists them.", example="v5e-16")
    slices: int = option(counted(1, 256), "Slices, at most.", default=1)
    capacity: str = option(choice(*CAPACITIES), "Kind of capacity.", default="on-demand")
    reservation: str = option(TEXT, "Name of the reservation, for `reserved`.", default="")
    managed_by: str = option(
        choice("provisioner", "terraform"),
        "Who creates node pools: the provisioner, when a job needs them; or Terraform, always.",
        default="provisioner",
    )
    autoscaling: bool = option(
        BOOLEAN, "With `terraform`: scale to zero while no job needs the slice.", default=False
    )
    topology_aware: bool = option(
        BOOLEAN,
        "With `terraform`: Kueue admits a job only when whole slices are free, and places it.",
        default=False,
    )
    zone: str = option(ZONE, "Zone (default: the first of zones).", default="")
    disk_type: str = option(
        choice(*DISK_TYPES),
        "Boot disk type (default: hyperdisk-balanced for v6e and tpu7x, else pd-balanced).",
        default="",
    )
    disk_gb: int = option(counted(20, 65536), "Boot disk size in GB.", default=200)
    image_streaming: bool = option(BOOLEAN, "Image streaming (gcfs).", default=True)
    gvnic: bool = option(BOOLEAN, "Google Virtual NIC.", default=True)
    auto_repair: bool = option(BOOLEAN, "Repair nodes automatically.", default=True)
    auto_upgrade: bool = option(BOOLEAN, AUTO_UPGRADE, default=True)
    labels: Mapping[str, str] = option(LABELS, "Kubernetes labels of nodes.", factory=dict)
    taints: tuple[Taint, ...] = option(
        list_of(section(Taint)), "Taints of nodes, besides GKE's google.com/tpu.", default=()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Registry:
    create: bool = option(BOOLEAN, "Create the repository.", default=True)
    name: str = option(NAME, "Name of the Docker repository.", default="ml-images")
    location: str = option(LOCATION, "Location (default: the region).", default="")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    location: str = option(LOCATION, "Location (default: the region).", default="")
    storage_class: str = option(choice(*STORAGE_CLASSES), "Storage class.", default="STANDARD")
    versioning: bool = option(BOOLEAN, "Keep former versions of objects.", default=False)
    hierarchical: bool = option(
        BOOLEAN, "Hierarchical namespace: faster renames, for checkpoints.", default=False
    )
    delete_after_days: int = option(
        counted(0, 36500), "Delete objects of this age; 0: never.", default=0
    )
    teams: tuple[str, ...] = option(
        list_of(NAME), "Teams that may write (default: all).", default=()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBoard:
    """A Vertex AI TensorBoard instance."""

    name: str = option(TEXT, "Display name.", default="TPU Training")
    description: str = option(TEXT, "Description.", default="Metrics of training jobs")
    region: str = option(REGION, "Region (default: the region).", default="")


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    namespace: str = option(NAME, "Namespace of its jobs (default: the team's name).", default="")
    queue: str = option(NAME, "Name of its Kueue LocalQueue.", default="tpu-training-jobs")
    service_account: str = option(
        NAME, "Kubernetes service account of its jobs.", default="tpu-worker"
    )
    roles: tuple[str, ...] = option(
        list_of(ROLE), "Roles of its jobs on the project, besides its buckets.",
        default=("roles/logging.logWriter",),
    )  # fmt: skip
    quota: Mapping[str, int] = option(
        mapping_of(ACCELERATOR, counted(0, 256)),
        "Guaranteed slices by TPU type (default: an equal share by weight).", factory=dict,
    )  # fmt: skip
    weight: int = option(counted(1, 100), "Share of idle capacity, beside others.", default=1)
    borrow: bool = option(BOOLEAN, "May use slices that other teams leave idle.", default=True)
    lend: bool = option(BOOLEAN, "Others may use its idle slices.", default=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    image: str = option(
        IMAGE, "Image of server, provisioner and jobs, with its tag (default: in the registry).",
        default="",
    )  # fmt: skip
    replicas: int = option(counted(1, 10), "Replicas of the server.", default=2)
    namespace: str = option(NAME, "Namespace of the server.", default="tpufleet-system")


@dataclass(frozen=True, kw_only=True, slots=True)
class AddOns:
    """Versions installed in the cluster."""

    jobset: str = option(VERSION, "JobSet.", default="v0.12.0")
    kueue: str = option(VERSION, "Kueue.", default="v0.18.3")
    cert_manager: str = option(VERSION, "cert-manager.", default="v1.18.2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Alerts by e-mail to billing administrators; nothing is stopped."""

    billing_account: str = option(TEXT, "Billing account.", example="012345-567890-ABCDEF")
    monthly_usd: float = option(NUMBER, "Budget per month.", example="20000")
    alert_percent: tuple[int, ...] = option(
        list_of(counted(1, 200)), "Alert at these percentages.", default=(50, 90, 100)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    project: str = option(PROJECT, "Google Cloud project id.", example="my-project")
    region: str = option(REGION, "Region of the cluster and its network.", example="us-central1")
    zones: tuple[str, ...] = option(
        list_of(ZONE), "Zones of node pools, in the region.", example="[us-central1-a]"
    )
    name: str = option(SHORT_NAME, "Name of the environment, prefix of its parts.", default="ml")
    labels: Mapping[str, str] = option(
        RESOURCE_LABELS, "Labels of all Google Cloud resources.", factory=dict
    )
    deletion_protection: bool = option(
        BOOLEAN, "Refuse to delete the cluster and buckets.", default=True
    )
    automation: Automation = option(
        section(Automation), "State bucket, service account and APIs.", factory=Automation
    )
    network: Network = option(section(Network), "VPC, ranges and NAT.", factory=Network)
    cluster: Cluster = option(section(Cluster), "GKE cluster.", factory=Cluster)
    nodes: NodeDefaults = option(
        section(NodeDefaults), "Service account of nodes.", factory=NodeDefaults
    )
    cpu_pools: Mapping[str, CpuPool] = option(
        mapping_of(NAME, section(CpuPool)), "CPU node pools by name.",
        factory=lambda: {"cpu": CpuPool()},
    )  # fmt: skip
    gpu_pools: Mapping[str, GpuPool] = option(
        mapping_of(NAME, section(GpuPool)), "GPU node pools by name.", factory=dict
    )
    tpu_pools: Mapping[str, TpuPool] = option(
        mapping_of(NAME, section(TpuPool)), "TPU slices by name.", factory=dict
    )
    registry: Registry = option(
        section(Registry), "Artifact Registry for images.", factory=Registry
    )
    buckets: Mapping[str, Bucket] = option(
        mapping_of(NAME, section(Bucket)), "Buckets by name, prefixed with PROJECT-NAME-.",
        factory=lambda: {"artifacts": Bucket()},
    )  # fmt: skip
    tensorboard: TensorBoard | None = option(
        section(TensorBoard), "Vertex AI TensorBoard.", default=None
    )
    teams: Mapping[str, Team] = option(
        mapping_of(NAME, section(Team)), "Teams, with namespace, queue and quota.",
        factory=lambda: {"training": Team(namespace="tpu-training")},
    )  # fmt: skip
    server: Server = option(section(Server), "tpufleet server.", factory=Server)
    addons: AddOns = option(section(AddOns), "Versions in the cluster.", factory=AddOns)
    budget: Budget | None = option(section(Budget), "Budget alerts.", default=None)


ENVIRONMENT = section(Environment)
