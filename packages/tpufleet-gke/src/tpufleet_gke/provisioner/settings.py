"""Provisioner settings: the former provisioner's 19 environment variables, plus extensions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from tpufleet import schema
from tpufleet.errors import BadInput, invalid, suggest
from tpufleet.model.tpu import tpu_types
from tpufleet.model.values import durations
from tpufleet.schema import Problem, Text, about
from tpufleet_gke.locations import Zone
from tpufleet_gke.provisioner.model import label_keys

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeNetwork:
    network: str
    subnetwork: str


@dataclass(frozen=True, slots=True)
class Limit:
    """Upper bounds over managed pools. None means unlimited."""

    total: float | None = None
    namespaces: Mapping[str, float] = field(default_factory=dict)  # `*`: each that is not listed

    def of(self, namespace: str) -> float | None:
        return self.namespaces.get(namespace, self.namespaces.get("*"))


def parse_networks(text: str, source: str) -> tuple[NodeNetwork, ...]:
    """Parse `vpc1:subnet1, vpc2:subnet2`. `source` names the annotation in errors."""
    try:
        return tuple(map(_network, filter(None, map(str.strip, text.split(",")))))
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from None


def _network(text: str) -> NodeNetwork:
    network, colon, subnetwork = (part.strip() for part in text.partition(":"))
    if not (network and colon and subnetwork) or ":" in subnetwork:
        raise invalid(text, "NETWORK:SUBNETWORK", "tpu-net:tpu-subnet")
    return NodeNetwork(network, subnetwork)


def _limit(text: str) -> Limit:
    total, namespaces = None, {}
    for item in filter(None, map(str.strip, text.split(","))):
        name, equals, amount = (part.strip() for part in item.rpartition("="))
        if not re.fullmatch(r"\d+(\.\d+)?", amount) or bool(name) != bool(equals):
            raise invalid(item, "TOTAL, NAMESPACE=LIMIT or *=LIMIT", "lab=256")
        if name:
            namespaces[name] = float(amount)
        else:
            total = float(amount)
    return Limit(total, namespaces)


def _duration(text: str) -> timedelta | None:
    """Also in milliseconds, as in Go."""
    milliseconds = re.fullmatch(r"(\d+)ms", text)
    return timedelta(milliseconds=int(milliseconds[1])) if milliseconds else durations.parse(text)


def _positive(text: str) -> timedelta | None:
    value = _duration(text)
    if value == timedelta(0):
        raise BadInput("must be more than 0; unset it for the default")
    return value


def variable(name: str, default: Any) -> Any:
    return msgspec.field(name=name, default=default)


def from_variables(kind: type[T], environ: Mapping[str, str]) -> T:
    """InvalidSettings names all invalid variables. An empty one is unset."""
    known = {row.name for row in schema.rows(kind)}
    values = {name: environ.get(name, "").strip() for name in known}
    return schema.parse(kind, {name: value for name, value in values.items() if value}, lax=True)


NetworkTag = Annotated[
    str, schema.text("network tag", r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", example="tpu-nodes")
]
KmsKey = Annotated[
    str,
    schema.text(
        "key", r"(projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+)?",
        example="projects/p/locations/us-central1/keyRings/tpus/cryptoKeys/disks",
    ),
]  # fmt: skip
Duration = Annotated[timedelta, schema.custom("duration", _duration, write=durations.to_builtin)]
PositiveDuration = Annotated[
    timedelta, schema.custom("duration", _positive, write=durations.to_builtin)
]
Networks = tuple[Annotated[NodeNetwork, schema.custom("NETWORK:SUBNETWORK", _network)], ...]
LimitText = Annotated[Limit, schema.custom("limits", _limit, write=lambda _: "no limit")]
Kind = Literal["jobset", "job", "leaderworkerset", "pod"]


class ProvisionerSettings(msgspec.Struct, frozen=True, kw_only=True):
    provider: Annotated[
        Literal["gke", "mock"], about("`mock` creates no pool and reports success.")
    ] = variable("PROVIDER", "gke")
    project: Annotated[Text, about("Project of the cluster.", default="metadata server")] = (
        variable("GCP_PROJECT_ID", "")
    )
    cluster_location: Annotated[
        Text, about("Region or zone of the cluster.", default="metadata server")
    ] = variable("GCP_CLUSTER_LOCATION", "")
    cluster: Annotated[Text, about("Name of the cluster.", default="metadata server")] = variable(
        "GCP_CLUSTER", ""
    )
    zones: Annotated[
        tuple[Zone, ...],
        about(
            "Where pools are created, in the region of the cluster; tried in order. Also as "
            "`GCP_ZONE`.",
            default="the provisioner's zone",
        ),
    ] = variable("GCP_ZONES", ())
    service_account: Annotated[Text, about("Service account of nodes.")] = variable(
        "GCP_NODE_SERVICE_ACCOUNT", ""
    )
    tags: Annotated[tuple[NetworkTag, ...], about("Network tags of nodes.")] = variable(
        "GCP_NODE_TAGS", ()
    )
    pod_to_node_labels: Annotated[tuple[Text, ...], about("Pod labels copied to nodes.")] = (
        variable("GCP_POD_TO_NODE_LABELS", ())
    )
    secondary_disk: Annotated[Text, about("Image of a secondary disk, with container images.")] = (
        variable("GCP_NODE_SECONDARY_DISK", "")
    )
    secure_boot: Annotated[bool, about("Secure boot of nodes.")] = variable(
        "GCP_NODE_SECURE_BOOT", True
    )
    additional_networks: Annotated[
        Networks, about("More networks of nodes: `vpc1:subnet1, vpc2:subnet2`.")
    ] = variable("GCP_NODE_ADDITIONAL_NETWORKS", ())
    disk_type: Annotated[Text, about("Type of boot disks.", default="GKE's")] = variable(
        "GCP_NODE_DISK_TYPE", ""
    )
    confidential_storage: Annotated[bool, about("Confidential storage on boot disks.")] = variable(
        "GCP_NODE_CONFIDENTIAL_STORAGE", False
    )
    boot_disk_kms_key: Annotated[KmsKey, about("Key that encrypts boot disks.")] = variable(
        "GCP_NODE_BOOT_DISK_KMS_KEY", ""
    )
    force_on_demand: Annotated[
        bool,
        about("No spot, no reservation; needs the admission webhook, which removes the selectors."),
    ] = variable("GCP_FORCE_ON_DEMAND", False)
    node_min_lifespan: Annotated[PositiveDuration, about("Minimum lifetime of nodes.")] = variable(
        "NODE_MIN_LIFESPAN", timedelta(seconds=10)
    )
    deletion_delay: Annotated[
        Duration, about("Between the end of a JobSet and the deletion of its pools.")
    ] = variable("NODEPOOL_DELETION_DELAY", timedelta(0))
    pod_resource: Annotated[Text, about("Resource that pods request.")] = variable(
        "POD_RESOURCE_TYPE", label_keys.TPU
    )
    concurrency: Annotated[int, Meta(ge=0), about("Concurrent create calls; not pools.")] = (
        variable("CONCURRENCY", 3)
    )
    # Extensions.
    served_kinds: Annotated[
        tuple[Kind, ...],
        about(
            "Kinds whose pods get pools; also `job`, `leaderworkerset` and `pod` (without a "
            "controller). The cluster must have each kind."
        ),
    ] = variable("SERVE_KINDS", ("jobset",))
    spot_fallback: Annotated[
        bool, about("Spot for pods that tolerate it, when on-demand is out of stock.")
    ] = variable("GCP_SPOT_FALLBACK", False)
    max_pods_per_node: Annotated[
        int, Meta(ge=8, le=256), about("For nodes with many small pods beside the job's.")
    ] = variable("GCP_MAX_PODS_PER_NODE", 15)
    budget_chips: Annotated[
        LimitText,
        about(
            "Most chips of all pools, of one namespace, and of each other namespace: "
            "`512, team-a=64, *=16`. Any part may be left out."
        ),
    ] = variable("BUDGET_CHIPS", Limit())
    budget_pools: Annotated[LimitText, about("Most node pools, likewise.")] = variable(
        "BUDGET_POOLS", Limit()
    )
    budget_dollars: Annotated[
        LimitText, about("Most dollars per hour at list prices, likewise.")
    ] = variable("BUDGET_DOLLARS", Limit())
    chip_hour_dollars: Annotated[
        Mapping[Text, Annotated[float, Meta(ge=0)]],
        about(
            "Own prices by TPU generation: `v5e=0.9,v6e=2`. A type without a price is not bought "
            "while dollars are limited.",
            default="list prices",
        ),
    ] = variable("CHIP_HOUR_DOLLARS", {})
    allowed_service_accounts: Annotated[
        tuple[Text, ...], about("Service accounts that annotations may name; `*` for any.")
    ] = variable("ALLOWED_NODE_SERVICE_ACCOUNTS", ())
    allowed_networks: Annotated[
        tuple[Text, ...],
        about(
            "Networks that annotations may name; `none` for only those of "
            "`GCP_NODE_ADDITIONAL_NETWORKS`.",
            default="any",
        ),
    ] = variable("ALLOWED_NODE_NETWORKS", ("*",))
    suspended_ttl: Annotated[Duration, about("How long pools of a suspended JobSet are kept.")] = (
        variable("SUSPENDED_TTL", timedelta(minutes=10))
    )
    not_serving_timeout: Annotated[
        PositiveDuration,
        about("A running pool that does not serve its waiting pod by then is deleted."),
    ] = variable("NOT_SERVING_TIMEOUT", timedelta(minutes=10))
    cordon_grace: Annotated[
        Duration,
        about(
            "Between the cordon of a pool's nodes and its deletion: a pod that the scheduler binds "
            "meanwhile keeps the pool. Longer for schedulers that are busier than that."
        ),
    ] = variable("CORDON_GRACE", timedelta(seconds=2))
    warm_pool_ttl: Annotated[
        Duration,
        about("How long an unused pool of an ended JobSet is kept for the next one of its kind."),
    ] = variable("WARM_POOL_TTL", timedelta(0))
    respect_auto_provisioning: Annotated[
        bool, about("No pools for pods that node auto-provisioning of the cluster serves.")
    ] = variable("RESPECT_NODE_AUTO_PROVISIONING", True)
    dynamic_slices: Annotated[
        bool, about("Form Slices of sub-blocks for pods that ask for one (dynamic slicing).")
    ] = variable("DYNAMIC_SLICES", False)
    poll_interval: Annotated[
        PositiveDuration, about("How often GKE is polled while pools are created or deleted.")
    ] = variable("POLL_INTERVAL", timedelta(seconds=2))
    lease_duration: Annotated[
        PositiveDuration, about("With `--leader-elect`: a dead leader is replaced after this.")
    ] = variable("LEASE_DURATION", timedelta(seconds=15))

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.cluster_location}/clusters/{self.cluster}"

    def check(self) -> Iterator[Problem]:
        location = self.cluster_location
        region = re.sub(r"-([a-z]|ai[0-9][a-z])$", "", location)
        for zone in self.zones:
            if location and not zone.startswith(f"{region}-"):
                yield "GCP_ZONES", f"{zone} is not in {region}, the region of the cluster"
        known = [generation for generation, *_ in tpu_types.GENERATIONS]
        for generation in self.chip_hour_dollars:
            if generation not in known:
                hint = suggest(generation, known)
                yield "CHIP_HOUR_DOLLARS", f"unknown generation {generation!r}{hint}"


def from_environ(environ: Mapping[str, str]) -> ProvisionerSettings:
    zones = environ.get("GCP_ZONES", "").strip() or environ.get("GCP_ZONE", "")
    return from_variables(ProvisionerSettings, {**environ, "GCP_ZONES": zones})
