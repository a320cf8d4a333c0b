"""Provisioner settings: upstream's 19 environment variables, plus extensions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from tpufleet.errors import BadInput
from tpufleet.model.tpu import tpu_types
from tpufleet.model.values import field_types
from tpufleet_gke.provisioner.model import label_keys, pod_owners

_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+)ms)?")
_AMOUNT = re.compile(r"\d+(\.\d+)?")
_NETWORKS = "GCP_NODE_ADDITIONAL_NETWORKS"
_TRUE, _FALSE = {"1", "t", "true"}, {"0", "f", "false"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionerBudget:
    """Upper bounds over all managed pools. None means unlimited."""

    max_chips: int | None = None
    max_pools: int | None = None
    max_chips_per_namespace: int | None = None  # for namespaces not listed below
    max_chips_by_namespace: Mapping[str, int] = field(default_factory=dict)  # by namespace
    max_pools_per_namespace: int | None = None
    max_pools_by_namespace: Mapping[str, int] = field(default_factory=dict)
    max_dollars: float | None = None  # per hour
    max_dollars_per_namespace: float | None = None
    max_dollars_by_namespace: Mapping[str, float] = field(default_factory=dict)
    chip_hour_dollars: Mapping[str, float] = field(default_factory=dict)  # by TPU generation

    def max_chips_in(self, namespace: str) -> int | None:
        return self.max_chips_by_namespace.get(namespace, self.max_chips_per_namespace)

    def max_pools_in(self, namespace: str) -> int | None:
        return self.max_pools_by_namespace.get(namespace, self.max_pools_per_namespace)

    def max_dollars_in(self, namespace: str) -> float | None:
        return self.max_dollars_by_namespace.get(namespace, self.max_dollars_per_namespace)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeNetwork:
    network: str
    subnetwork: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionerSettings:
    provider: str = "gke"  # or `mock`, which creates nothing
    project: str = ""
    cluster_location: str = ""
    cluster: str = ""
    zones: tuple[str, ...] = ()  # in order of preference
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
    # From the cordon of nodes until their pool is deleted: the scheduler may just bind a pod.
    cordon_grace: timedelta = timedelta(seconds=2)
    pod_resource: str = label_keys.TPU
    served_kinds: tuple[str, ...] = (
        pod_owners.JOBSET,
    )  # kinds of owners whose pods get node pools
    concurrency: int = 3
    # Extensions.
    spot_fallback: bool = False  # try spot for pods that tolerate it when on-demand is out of stock
    max_pods_per_node: int = 15
    budget: ProvisionerBudget = ProvisionerBudget()
    allowed_service_accounts: tuple[str, ...] = ()  # that annotations may name; "*" allows any
    allowed_networks: tuple[str, ...] = ("*",)  # likewise; any by default, as upstream
    suspended_ttl: timedelta = timedelta(minutes=10)
    # A running pool that does not serve the pod that waits for it by then is deleted.
    not_serving_timeout: timedelta = timedelta(minutes=10)
    # An unused pool of an ended JobSet is kept this long for the next one of the same kind.
    warm_pool_ttl: timedelta = timedelta(0)
    # No pools for pods that the cluster's node auto-provisioning serves.
    respect_auto_provisioning: bool = True
    poll_interval: timedelta = timedelta(seconds=2)  # while pools are changing
    lease_duration: timedelta = timedelta(seconds=15)  # how soon a dead leader is replaced
    dry_run: bool = False

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.cluster_location}/clusters/{self.cluster}"


def from_environ(environ: Mapping[str, str]) -> ProvisionerSettings:
    """BadInput names the invalid variable."""
    read = _Reader(environ)
    provider = read.text("PROVIDER", "gke")
    if provider not in ("gke", "mock"):
        raise BadInput(f"PROVIDER: expected gke or mock, got {provider!r}")
    zones = _zones(read)
    return ProvisionerSettings(
        provider=provider,
        project=read.text("GCP_PROJECT_ID"),
        cluster_location=read.text("GCP_CLUSTER_LOCATION"),
        cluster=read.text("GCP_CLUSTER"),
        zones=zones,
        service_account=read.text("GCP_NODE_SERVICE_ACCOUNT"),
        tags=read.list_of("GCP_NODE_TAGS"),
        pod_to_node_labels=read.list_of("GCP_POD_TO_NODE_LABELS"),
        secondary_disk=read.text("GCP_NODE_SECONDARY_DISK"),
        secure_boot=read.boolean("GCP_NODE_SECURE_BOOT", True),
        additional_networks=parse_networks(read.text(_NETWORKS), _NETWORKS),
        disk_type=read.text("GCP_NODE_DISK_TYPE"),
        confidential_storage=read.boolean("GCP_NODE_CONFIDENTIAL_STORAGE", False),
        boot_disk_kms_key=read.text("GCP_NODE_BOOT_DISK_KMS_KEY"),
        force_on_demand=read.boolean("GCP_FORCE_ON_DEMAND", False),
        node_min_lifespan=read.positive_duration("NODE_MIN_LIFESPAN", timedelta(seconds=10)),
        deletion_delay=read.duration("NODEPOOL_DELETION_DELAY", timedelta(0)),
        cordon_grace=read.duration("CORDON_GRACE", timedelta(seconds=2)),
        pod_resource=read.text("POD_RESOURCE_TYPE", label_keys.TPU),
        served_kinds=_served_kinds(read.list_of("SERVE_KINDS")),
        concurrency=read.number("CONCURRENCY", 3) or 1,
        spot_fallback=read.boolean("GCP_SPOT_FALLBACK", False),
        max_pods_per_node=read.number("GCP_MAX_PODS_PER_NODE", 15) or 15,
        budget=ProvisionerBudget(
            max_chips=read.number("BUDGET_CHIPS", None),
            max_pools=read.number("BUDGET_POOLS", None),
            max_chips_per_namespace=read.number("BUDGET_NAMESPACE_CHIPS", None),
            max_chips_by_namespace=read.numbers_by_name("BUDGET_CHIPS_OF", "NAMESPACE=CHIPS"),
            max_pools_per_namespace=read.number("BUDGET_NAMESPACE_POOLS", None),
            max_pools_by_namespace=read.numbers_by_name("BUDGET_POOLS_OF", "NAMESPACE=POOLS"),
            max_dollars=read.amount("BUDGET_DOLLARS"),
            max_dollars_per_namespace=read.amount("BUDGET_NAMESPACE_DOLLARS"),
            max_dollars_by_namespace=read.amounts("BUDGET_DOLLARS_OF", "NAMESPACE=DOLLARS"),
            chip_hour_dollars=_chip_prices(read),
        ),
        allowed_service_accounts=read.list_of("ALLOWED_NODE_SERVICE_ACCOUNTS"),
        allowed_networks=_allowed(read.list_of("ALLOWED_NODE_NETWORKS") or ("*",)),
        suspended_ttl=read.duration("SUSPENDED_TTL", timedelta(minutes=10)),
        not_serving_timeout=read.positive_duration("NOT_SERVING_TIMEOUT", timedelta(minutes=10)),
        warm_pool_ttl=read.duration("WARM_POOL_TTL", timedelta(0)),
        respect_auto_provisioning=read.boolean("RESPECT_NODE_AUTO_PROVISIONING", True),
        poll_interval=read.positive_duration("POLL_INTERVAL", timedelta(seconds=2)),
        lease_duration=read.positive_duration("LEASE_DURATION", timedelta(seconds=15)),
    )


def _zones(read: _Reader) -> tuple[str, ...]:
    name = "GCP_ZONES" if read.list_of("GCP_ZONES") else "GCP_ZONE"
    zones, location = read.list_of(name), read.text("GCP_CLUSTER_LOCATION")
    region = location if field_types.zone_error(location) else location.rpartition("-")[0]
    for zone in zones:
        if error := field_types.zone_error(zone):
            raise BadInput(f"{name}: {error}")
        if location and not zone.startswith(f"{region}-"):
            raise BadInput(f"{name}: {zone} is not in {region}, the region of the cluster")
    return zones


def _chip_prices(read: _Reader) -> dict[str, float]:
    prices = read.amounts("CHIP_HOUR_DOLLARS", "GENERATION=DOLLARS")
    known = [generation for generation, *_ in tpu_types.GENERATIONS]
    for generation in prices:
        if generation not in known:
            raise BadInput(
                f"CHIP_HOUR_DOLLARS: unknown generation {generation!r}; expected one of "
                f"{', '.join(known)}"
            )
    return prices


def _allowed(names: tuple[str, ...]) -> tuple[str, ...]:
    return () if names == ("none",) else names


def _served_kinds(kinds: tuple[str, ...]) -> tuple[str, ...]:
    served = tuple(dict.fromkeys(kind.lower() for kind in kinds)) or (pod_owners.JOBSET,)
    for kind in served:
        if kind not in pod_owners.KINDS:
            known = ", ".join(pod_owners.KINDS)
            raise BadInput(f"SERVE_KINDS: invalid kind {kind!r}; expected one of {known}")
    return served


def parse_networks(text: str, source: str) -> tuple[NodeNetwork, ...]:
    """Parse `vpc1:subnet1, vpc2:subnet2`. `source` names the variable or annotation in errors."""
    parsed = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        network, colon, subnetwork = (part.strip() for part in item.partition(":"))
        if not (network and colon and subnetwork) or ":" in subnetwork:
            raise BadInput(f"{source}: expected NETWORK:SUBNETWORK, got {item!r}")
        parsed.append(NodeNetwork(network=network, subnetwork=subnetwork))
    return tuple(parsed)


@dataclass(frozen=True, slots=True)
class _Reader:
    environ: Mapping[str, str]

    def text(self, name: str, default: str = "") -> str:
        return self.environ.get(name, "").strip() or default

    def list_of(self, name: str) -> tuple[str, ...]:
        return tuple(filter(None, (part.strip() for part in self.text(name).split(","))))

    def boolean(self, name: str, default: bool) -> bool:
        value = self.text(name).lower()
        if value and value not in _TRUE | _FALSE:
            raise BadInput(f"{name}: expected true or false, got {value!r}")
        return value in _TRUE if value else default

    def number(self, name: str, default: int | None) -> int | None:
        value = self.text(name)
        if value and not value.isdecimal():
            raise BadInput(f"{name}: expected a whole number, got {value!r}")
        return int(value) if value else default

    def numbers_by_name(self, name: str, form: str) -> dict[str, int]:
        numbers = {}
        for item in self.list_of(name):
            key, _, value = (part.strip() for part in item.partition("="))
            if not key or not value.isdecimal():
                raise BadInput(f"{name}: expected {form}, got {item!r}")
            numbers[key] = int(value)
        return numbers

    def amount(self, name: str) -> float | None:
        value = self.text(name)
        if value and not _AMOUNT.fullmatch(value):
            raise BadInput(f"{name}: expected an amount such as 120 or 99.50, got {value!r}")
        return float(value) if value else None

    def amounts(self, name: str, form: str) -> dict[str, float]:
        amounts = {}
        for item in self.list_of(name):
            key, _, value = (part.strip() for part in item.partition("="))
            if not key or not _AMOUNT.fullmatch(value):
                raise BadInput(f"{name}: expected {form}, got {item!r}")
            amounts[key] = float(value)
        return amounts

    def positive_duration(self, name: str, default: timedelta) -> timedelta:
        value = self.duration(name, default)
        if value <= timedelta(0):
            seconds = f"{default.total_seconds():g}s"
            raise BadInput(f"{name}: must be more than 0; unset it for the default, {seconds}")
        return value

    def duration(self, name: str, default: timedelta) -> timedelta:
        value = self.text(name)
        if not value:
            return default
        if value == "0":
            return timedelta(0)
        match = _DURATION.fullmatch(value)
        if match is None:
            raise BadInput(f"{name}: expected a duration such as 10s or 1m30s, got {value!r}")
        hours, minutes, seconds, milliseconds = (float(part or 0) for part in match.groups())
        return timedelta(hours=hours, minutes=minutes, seconds=seconds, milliseconds=milliseconds)
