"""The sections of cluster.yaml. Each field is declared once, here: the parser, the JSON schema, the
starter file and the table in the documentation read these structs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tpufleet.schema import Text, about
from tpufleet_gke.environment.config.value_types import (
    BillingAccount,
    BucketLocation,
    BucketName,
    GoogleApi,
    IamRole,
    MachineType,
    Name,
    NetworkRange,
    NodeLabel,
    NodeLabelValue,
    PinnedImage,
    Project,
    RegistryLocation,
    Release,
    ReservationName,
    ResourceLabel,
    ResourceLabelValue,
    ResourceName,
    ServiceAccount,
    ShortName,
    SubnetRange,
    TpuType,
    Version,
)
from tpufleet_gke.locations import Region, Zone

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
    "roles/compute.securityAdmin",
    "roles/container.admin",
    "roles/iam.roleAdmin",
    "roles/iam.serviceAccountAdmin",
    "roles/iam.serviceAccountUser",
    "roles/logging.logWriter",
    "roles/resourcemanager.projectIamAdmin",
    "roles/serviceusage.serviceUsageConsumer",
    "roles/storage.admin",
)
DiskType = Literal["pd-standard", "pd-balanced", "pd-ssd", "hyperdisk-balanced"]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping in the file."""


class Taint(Section, frozen=True, kw_only=True):
    key: Annotated[NodeLabel, about("Key of the taint.", example="dedicated")]
    value: Annotated[NodeLabelValue, about("Value of the taint.")] = "true"
    effect: Annotated[
        Literal["NO_SCHEDULE", "PREFER_NO_SCHEDULE", "NO_EXECUTE"], about("Effect.")
    ] = "NO_SCHEDULE"


class Automation(Section, frozen=True, kw_only=True):
    """Created by the first stage; the other stages run as its service account."""

    bucket: Annotated[
        BucketName,
        about("Bucket of Terraform state and outputs.", default="PROJECT-NAME-automation"),
    ] = ""
    location: Annotated[BucketLocation, about("Location of the bucket.", default="the region")] = ""
    create_bucket: Annotated[bool, about("Create the bucket.")] = True
    state_prefix: Annotated[Name, about("Folder of Terraform state in the bucket.")] = "tfstate"
    service_account: Annotated[
        ServiceAccount, about("Service account that applies the other stages.")
    ] = "tpu-automation"
    create_service_account: Annotated[bool, about("Create the service account.")] = True
    roles: Annotated[tuple[IamRole, ...], about("Roles of the service account on the project.")] = (
        AUTOMATION_ROLES
    )
    enable_apis: Annotated[bool, about("Enable the Google APIs.")] = True
    services: Annotated[
        tuple[GoogleApi, ...],
        about("Google APIs to enable besides those that the environment needs."),
    ] = ()


class ExistingNetwork(Section, frozen=True, kw_only=True):
    """A VPC that exists, in this project or, as a Shared VPC, in a host project."""

    host_project: Annotated[Project, about("Host project of a Shared VPC.")] = ""
    network: Annotated[ResourceName, about("Name of the network.", example="shared-vpc")]
    subnetwork: Annotated[
        ResourceName, about("Name of the subnetwork, in the region.", example="gke-nodes")
    ]
    pods_range: Annotated[
        ResourceName, about("Name of its secondary range for pods.", example="pods")
    ]
    services_range: Annotated[
        ResourceName, about("Name of its secondary range for services.", example="svc")
    ]
    create_grants: Annotated[
        bool, about("Create the grants and the firewall rule in the host project.")
    ] = True


class Network(Section, frozen=True, kw_only=True):
    existing: Annotated[ExistingNetwork | None, about("Use this VPC instead of creating one.")] = (
        None
    )
    name: Annotated[Name, about("Name of the VPC.", default="NAME-network")] = ""
    subnetwork: Annotated[Name, about("Name of its subnetwork.", default="NAME-REGION")] = ""
    nodes: Annotated[SubnetRange, about("Range of nodes.")] = "10.0.0.0/18"
    pods: Annotated[SubnetRange, about("Range of pods.", default="sized from the node pools")] = ""
    services: Annotated[SubnetRange, about("Range of services.")] = "10.64.0.0/20"
    control_plane: Annotated[SubnetRange, about("Range of the control plane, a /28.")] = (
        "172.16.0.0/28"
    )
    private_nodes: Annotated[bool, about("Nodes have no public addresses.")] = True
    private_endpoint: Annotated[bool, about("The control plane has no public address.")] = False
    nat: Annotated[bool, about("Create Cloud NAT, for private nodes to reach out.")] = True
    authorized_networks: Annotated[
        Mapping[Name, NetworkRange], about("Ranges that may reach the control plane, by name.")
    ] = {}


class Cluster(Section, frozen=True, kw_only=True):
    name: Annotated[Name, about("Name of the cluster.", default="NAME-cluster")] = ""
    channel: Annotated[
        Literal["RAPID", "REGULAR", "STABLE", "EXTENDED"],
        about("Release channel: RAPID, REGULAR, STABLE or EXTENDED."),
    ] = "REGULAR"
    version: Annotated[
        Version, about("Minimum version of the control plane.", default="the channel's")
    ] = ""
    description: Annotated[Text, about("Description.")] = "JAX training on TPUs"
    # https://cloud.google.com/kubernetes-engine/docs/concepts/about-logs
    logging: Annotated[
        tuple[
            Literal[
                "SYSTEM_COMPONENTS", "WORKLOADS", "APISERVER", "CONTROLLER_MANAGER", "SCHEDULER"
            ],
            ...,
        ],
        about("Logs to collect; also APISERVER, CONTROLLER_MANAGER and SCHEDULER."),
    ] = ("SYSTEM_COMPONENTS", "WORKLOADS")
    managed_prometheus: Annotated[bool, about("Managed Service for Prometheus.")] = True
    gcs_fuse: Annotated[bool, about("Cloud Storage FUSE CSI driver.")] = True
    persistent_disk: Annotated[bool, about("Persistent Disk CSI driver.")] = True
    cloud_dns: Annotated[bool, about("Cloud DNS for names in the cluster.")] = True


class NodeDefaults(Section, frozen=True, kw_only=True):
    service_account: Annotated[
        ServiceAccount, about("Service account of all nodes.", default="NAME-gke-nodes")
    ] = ""
    roles: Annotated[
        tuple[IamRole, ...], about("Its roles on the project; buckets are granted separately.")
    ] = NODE_ROLES


# Fields that several kinds of pools have.
PoolMachineType = Annotated[MachineType, about("Machine type.")]
MinNodes = Annotated[int, Meta(ge=0, le=1000), about("Fewest nodes, over all zones.")]
MaxNodes = Annotated[int, Meta(ge=1, le=1000), about("Most nodes, over all zones.")]
DiskSize = Annotated[int, Meta(ge=20, le=65536), about("Boot disk size in GB.")]
ImageStreaming = Annotated[bool, about("Image streaming (gcfs).")]
Gvnic = Annotated[bool, about("Google Virtual NIC.")]
AutoRepair = Annotated[bool, about("Repair nodes automatically.")]
Labels = Annotated[Mapping[NodeLabel, NodeLabelValue], about("Kubernetes labels of nodes.")]


class CpuPool(Section, frozen=True, kw_only=True):
    machine_type: PoolMachineType = "n2-standard-8"
    min_nodes: MinNodes = 1
    max_nodes: MaxNodes = 5
    zones: Annotated[tuple[Zone, ...], about("Zones.", default="zones")] = ()
    disk_type: Annotated[DiskType, about("Boot disk type.")] = "pd-balanced"
    disk_gb: DiskSize = 100
    spot: Annotated[bool, about("Spot VMs.")] = False
    image_type: Annotated[Literal["COS_CONTAINERD", "UBUNTU_CONTAINERD"], about("Node image.")] = (
        "COS_CONTAINERD"
    )
    image_streaming: ImageStreaming = True
    gvnic: Gvnic = True
    auto_repair: AutoRepair = True
    labels: Labels = {}
    taints: Annotated[tuple[Taint, ...], about("Taints of nodes.")] = ()


class GpuPool(CpuPool, frozen=True, kw_only=True):
    machine_type: PoolMachineType = "g2-standard-12"
    min_nodes: MinNodes = 0
    max_nodes: MaxNodes = 1
    accelerator: Annotated[Text, about("GPU type.")] = "nvidia-l4"
    accelerator_count: Annotated[int, Meta(ge=1, le=16), about("GPUs per node.")] = 1
    local_ssds: Annotated[int, Meta(ge=0, le=32), about("Local SSDs per node.")] = 0


class TpuPool(Section, frozen=True, kw_only=True):
    type: Annotated[TpuType, about("TPU type, as `tpu types` lists them.", example="v5e-16")]
    slices: Annotated[int, Meta(ge=0, le=256), about("Slices, at most; 0: none for now.")] = 1
    capacity: Annotated[
        Literal["on-demand", "spot", "reserved", "flex-start"],
        about("Kind of capacity: on-demand, spot, reserved or flex-start."),
    ] = "on-demand"
    reservation: Annotated[ReservationName, about("Name of the reservation, for `reserved`.")] = ""
    managed_by: Annotated[
        Literal["provisioner", "terraform", "compute-class"],
        about(
            "Who creates node pools: the provisioner, when a job needs them; Terraform, always; or "
            "GKE, by a ComputeClass, when a job needs them."
        ),
    ] = "provisioner"
    fallback: Annotated[
        tuple[Literal["on-demand", "spot", "reserved"], ...],
        about("With `compute-class`: kinds of capacity that GKE tries next, in order."),
    ] = ()
    autoscaling: Annotated[
        bool, about("With `terraform`: scale to zero while no job needs the slice.")
    ] = False
    topology_aware: Annotated[
        bool,
        about(
            "With `terraform`: Kueue admits a job only when whole slices are free, and places it."
        ),
    ] = False
    zone: Annotated[Zone, about("Zone.", default="the first of zones that has the type")] = ""
    disk_type: Annotated[
        DiskType | None,
        about("Boot disk type.", default="hyperdisk-balanced for v6e and tpu7x, else pd-balanced"),
    ] = None
    disk_gb: DiskSize = 200
    image_streaming: ImageStreaming = True
    gvnic: Gvnic = True
    auto_repair: AutoRepair = True
    labels: Labels = {}
    taints: Annotated[
        tuple[Taint, ...], about("Taints of nodes, besides GKE's google.com/tpu.")
    ] = ()


class Registry(Section, frozen=True, kw_only=True):
    create: Annotated[bool, about("Create the repository.")] = True
    name: Annotated[Name, about("Name of the Docker repository.")] = "ml-images"
    location: Annotated[RegistryLocation, about("Location.", default="the region")] = ""


class Bucket(Section, frozen=True, kw_only=True):
    location: Annotated[BucketLocation, about("Location.", default="the region")] = ""
    storage_class: Annotated[
        Literal["STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE"],
        about("Storage class: STANDARD, NEARLINE, COLDLINE or ARCHIVE."),
    ] = "STANDARD"
    versioning: Annotated[bool, about("Keep former versions of objects.")] = False
    hierarchical: Annotated[
        bool, about("Hierarchical namespace: faster renames, for checkpoints.")
    ] = False
    delete_after_days: Annotated[
        int, Meta(ge=0, le=36500), about("Delete objects of this age; 0: never.")
    ] = 0
    teams: Annotated[tuple[Name, ...], about("Teams that may write.", default="all")] = ()


class TensorBoard(Section, frozen=True, kw_only=True):
    """A Vertex AI TensorBoard instance."""

    name: Annotated[Text, about("Display name.")] = "TPU Training"
    description: Annotated[Text, about("Description.")] = "Metrics of training jobs"
    region: Annotated[Region, about("Region.", default="the region")] = ""


class Team(Section, frozen=True, kw_only=True):
    namespace: Annotated[Name, about("Namespace of its jobs.", default="the team's name")] = ""
    queue: Annotated[Name, about("Name of its Kueue LocalQueue.")] = "tpu-training-jobs"
    service_account: Annotated[Name, about("Kubernetes service account of its jobs.")] = (
        "tpu-worker"
    )
    users: Annotated[
        tuple[Text, ...], about("Users of the server whose jobs are the team's.", default="all")
    ] = ()
    roles: Annotated[
        tuple[IamRole, ...], about("Roles of its jobs on the project, besides its buckets.")
    ] = ("roles/logging.logWriter",)
    quota: Annotated[
        Mapping[TpuType, Annotated[int, Meta(ge=0, le=256)]],
        about("Guaranteed slices by TPU type.", default="an equal share by weight"),
    ] = {}
    weight: Annotated[int, Meta(ge=1, le=100), about("Share of idle capacity, beside others.")] = 1
    borrow: Annotated[bool, about("May use slices that other teams leave idle.")] = True
    lend: Annotated[bool, about("Others may use its idle slices.")] = True


class Server(Section, frozen=True, kw_only=True):
    image: Annotated[
        PinnedImage,
        about("Image of server, provisioner and jobs, with its tag.", default="in the registry"),
    ] = ""
    replicas: Annotated[int, Meta(ge=1, le=10), about("Replicas of the server.")] = 2
    firestore_bridge: Annotated[bool, about("Firestore bridge, with an account of its own.")] = (
        False
    )


class AddOns(Section, frozen=True, kw_only=True):
    """Versions installed in the cluster."""

    jobset: Annotated[Release, about("JobSet.")] = "v0.12.0"
    kueue: Annotated[Release, about("Kueue.")] = "v0.18.3"
    cert_manager: Annotated[Release, about("cert-manager.")] = "v1.18.2"


class Budget(Section, frozen=True, kw_only=True):
    """Alerts by e-mail to billing administrators; nothing is stopped."""

    billing_account: Annotated[
        BillingAccount, about("Billing account.", example="012345-567890-ABCDEF")
    ]
    monthly_usd: Annotated[int, Meta(ge=1), about("Budget per month.", example="20000")]
    alert_percent: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=200)], ...], about("Alert at these percentages.")
    ] = (50, 90, 100)


class Environment(Section, frozen=True, kw_only=True):
    project: Annotated[Project, about("Google Cloud project id.", example="my-project")]
    region: Annotated[
        Region, about("Region of the cluster and its network.", example="us-central1")
    ]
    zones: Annotated[
        tuple[Zone, ...], about("Zones of node pools, in the region.", example="[us-central1-a]")
    ]
    name: Annotated[ShortName, about("Name of the environment, prefix of its parts.")] = "ml"
    labels: Annotated[
        Mapping[ResourceLabel, ResourceLabelValue], about("Labels of all Google Cloud resources.")
    ] = {}
    deletion_protection: Annotated[bool, about("Refuse to delete the cluster and buckets.")] = True
    automation: Annotated[Automation, about("State bucket, service account and APIs.")] = (
        Automation()
    )
    network: Annotated[Network, about("VPC, ranges and NAT.")] = Network()
    cluster: Annotated[Cluster, about("GKE cluster.")] = Cluster()
    nodes: Annotated[NodeDefaults, about("Service account of nodes.")] = NodeDefaults()
    cpu_pools: Annotated[Mapping[Name, CpuPool], about("CPU node pools by name.")] = msgspec.field(
        default_factory=lambda: {"cpu": CpuPool()}
    )
    gpu_pools: Annotated[Mapping[Name, GpuPool], about("GPU node pools by name.")] = {}
    tpu_pools: Annotated[Mapping[Name, TpuPool], about("TPU slices by name.")] = {}
    registry: Annotated[Registry, about("Artifact Registry for images.")] = Registry()
    buckets: Annotated[
        Mapping[Name, Bucket], about("Buckets by name, prefixed with PROJECT-NAME-.")
    ] = msgspec.field(default_factory=lambda: {"artifacts": Bucket()})
    tensorboard: Annotated[TensorBoard | None, about("Vertex AI TensorBoard.")] = None
    teams: Annotated[Mapping[Name, Team], about("Teams, with namespace, queue and quota.")] = (
        msgspec.field(default_factory=lambda: {"training": Team(namespace="tpu-training")})
    )
    server: Annotated[Server, about("tpufleet server.")] = Server()
    service_accounts: Annotated[
        Mapping[Name, ServiceAccount],
        about("Names of service accounts: of `server`, `bridge`, `provisioner`, or of a team."),
    ] = {}
    addons: Annotated[AddOns, about("Versions in the cluster.")] = AddOns()
    budget: Annotated[Budget | None, about("Budget alerts.")] = None
