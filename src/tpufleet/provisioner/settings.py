"""What the provisioner is told when it starts: the nineteen variables of old, and ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from tpufleet.errors import BadInput
from tpufleet.provisioner.kube import label_keys, pod_owners

_SPAN = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+)ms)?")
_NETWORKS = "GCP_NODE_ADDITIONAL_NETWORKS"
_TRUE, _FALSE = {"1", "t", "true"}, {"0", "f", "false"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionerBudget:
    """The most that all pools together may hold. None: no bound."""

    max_chips: int | None = None
    max_pools: int | None = None
    max_chips_per_namespace: int | None = None  # of each namespace that is not named below
    max_chips_by_namespace: Mapping[str, int] = field(default_factory=dict)  # by namespace

    def max_chips_in(self, namespace: str) -> int | None:
        return self.max_chips_by_namespace.get(namespace, self.max_chips_per_namespace)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeNetwork:
    network: str
    subnetwork: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionerSettings:
    provider: str = "gke"  # or `mock`, which does nothing
    project: str = ""
    cluster_location: str = ""
    cluster: str = ""
    zones: tuple[str, ...] = ()  # in the order in which they are tried
    service_account: str = ""
    tags: tuple[str, ...] = ()
    pod_to_node_labels: tuple[str, ...] = ()
    secondary_disk: str = ""
    secure_boot: bool = True
    additional_networks: tuple[NodeNetwork, ...] = ()
    disk_type: str = ""
    confidential_storage: bool = False
    boot_disk_kms_key: str = ""
    force_on_demand: bool = False
    node_min_lifespan: timedelta = timedelta(seconds=10)
    deletion_delay: timedelta = timedelta(0)
    pod_resource: str = label_keys.TPU
    served_kinds: tuple[str, ...] = (pod_owners.JOBSET,)  # whose pods get pools
    concurrency: int = 3
    # Beyond the variables of old.
    spot_fallback: bool = False  # where on-demand is out of stock, pods that tolerate spot get it
    max_pods_per_node: int = 15
    budget: ProvisionerBudget = ProvisionerBudget()
    allowed_service_accounts: tuple[str, ...] = ()  # by annotation; "*": any
    allowed_networks: tuple[str, ...] = ()
    suspended_ttl: timedelta = timedelta(minutes=10)
    poll_interval: timedelta = timedelta(seconds=2)  # of GKE, while pools come and go
    lease_duration: timedelta = timedelta(seconds=15)  # a dead leader is replaced after it
    dry_run: bool = False

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.cluster_location}/clusters/{self.cluster}"


def from_environ(environ: Mapping[str, str]) -> ProvisionerSettings:
    """The same environment gives the same settings. BadInput names the variable at fault."""
    read = _Reader(environ)
    lifespan = read.some("NODE_MIN_LIFESPAN", timedelta(seconds=10))
    provider = read.text("PROVIDER", "gke")
    if provider not in ("gke", "mock"):
        raise BadInput(f"PROVIDER must be gke or mock, not {provider!r}")
    zones = read.items("GCP_ZONES") or read.items("GCP_ZONE")
    return ProvisionerSettings(
        provider=provider,
        project=read.text("GCP_PROJECT_ID"),
        cluster_location=read.text("GCP_CLUSTER_LOCATION"),
        cluster=read.text("GCP_CLUSTER"),
        zones=zones,
        service_account=read.text("GCP_NODE_SERVICE_ACCOUNT"),
        tags=read.items("GCP_NODE_TAGS"),
        pod_to_node_labels=read.items("GCP_POD_TO_NODE_LABELS"),
        secondary_disk=read.text("GCP_NODE_SECONDARY_DISK"),
        secure_boot=read.truth("GCP_NODE_SECURE_BOOT", True),
        additional_networks=parse_networks(read.text(_NETWORKS), _NETWORKS),
        disk_type=read.text("GCP_NODE_DISK_TYPE"),
        confidential_storage=read.truth("GCP_NODE_CONFIDENTIAL_STORAGE", False),
        boot_disk_kms_key=read.text("GCP_NODE_BOOT_DISK_KMS_KEY"),
        force_on_demand=read.truth("GCP_FORCE_ON_DEMAND", False),
        node_min_lifespan=lifespan,
        deletion_delay=read.span("NODEPOOL_DELETION_DELAY", timedelta(0)),
        pod_resource=read.text("POD_RESOURCE_TYPE", label_keys.TPU),
        served_kinds=_served(read.items("SERVE_KINDS")),
        concurrency=read.number("CONCURRENCY", 3) or 1,
        spot_fallback=read.truth("GCP_SPOT_FALLBACK", False),
        max_pods_per_node=read.number("GCP_MAX_PODS_PER_NODE", 15) or 15,
        budget=ProvisionerBudget(
            max_chips=read.number("BUDGET_CHIPS", None),
            max_pools=read.number("BUDGET_POOLS", None),
            max_chips_per_namespace=read.number("BUDGET_NAMESPACE_CHIPS", None),
            max_chips_by_namespace=read.numbers("BUDGET_CHIPS_OF"),
        ),
        allowed_service_accounts=read.items("ALLOWED_NODE_SERVICE_ACCOUNTS"),
        allowed_networks=read.items("ALLOWED_NODE_NETWORKS"),
        suspended_ttl=read.span("SUSPENDED_TTL", timedelta(minutes=10)),
        poll_interval=read.some("POLL_INTERVAL", timedelta(seconds=2)),
        lease_duration=read.some("LEASE_DURATION", timedelta(seconds=15)),
        dry_run=read.truth("DRY_RUN", False),
    )


def _served(kinds: tuple[str, ...]) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(kind.lower() for kind in kinds)) or (pod_owners.JOBSET,)
    for kind in chosen:
        if kind not in pod_owners.KINDS:
            known = ", ".join(pod_owners.KINDS)
            raise BadInput(f"SERVE_KINDS: {kind!r} is not one of {known}")
    return chosen


def parse_networks(text: str, where: str) -> tuple[NodeNetwork, ...]:
    """`vpc1:subnet1, vpc2:subnet2`."""
    found = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        network, colon, subnetwork = (part.strip() for part in item.partition(":"))
        if not (network and colon and subnetwork) or ":" in subnetwork:
            raise BadInput(f"{where}: {item!r} is not NETWORK:SUBNETWORK")
        found.append(NodeNetwork(network=network, subnetwork=subnetwork))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Reader:
    environ: Mapping[str, str]

    def text(self, name: str, otherwise: str = "") -> str:
        return self.environ.get(name, "").strip() or otherwise

    def items(self, name: str) -> tuple[str, ...]:
        return tuple(filter(None, (part.strip() for part in self.text(name).split(","))))

    def truth(self, name: str, otherwise: bool) -> bool:
        said = self.text(name).lower()
        if said and said not in _TRUE | _FALSE:
            raise BadInput(f"{name} must be true or false, not {said!r}")
        return said in _TRUE if said else otherwise

    def number(self, name: str, otherwise: int | None) -> int | None:
        said = self.text(name)
        if said and not said.isdecimal():
            raise BadInput(f"{name} must be a whole number, not {said!r}")
        return int(said) if said else otherwise

    def numbers(self, name: str) -> dict[str, int]:
        found = {}
        for item in self.items(name):
            key, _, value = item.partition("=")
            if not key.strip() or not value.strip().isdecimal():
                raise BadInput(f"{name}: {item!r} is not NAMESPACE=CHIPS")
            found[key.strip()] = int(value)
        return found

    def some(self, name: str, otherwise: timedelta) -> timedelta:
        found = self.span(name, otherwise)
        if found <= timedelta(0):
            usual = f"{otherwise.total_seconds():g}s"
            raise BadInput(f"{name} must be more than 0; leave it out for {usual}")
        return found

    def span(self, name: str, otherwise: timedelta) -> timedelta:
        said = self.text(name)
        if not said:
            return otherwise
        match = _SPAN.fullmatch(said)
        if said == "0":
            return timedelta(0)
        if match is None:
            raise BadInput(f"{name} must be a span such as 10s or 1m30s, not {said!r}")
        hours, minutes, seconds, thousandths = (float(part or 0) for part in match.groups())
        return timedelta(hours=hours, minutes=minutes, seconds=seconds, milliseconds=thousandths)
