"""The node pool that a waiting pod needs, as the create request for GKE. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.model.fleet import compute_reservations
from tpufleet.model.fleet.compute_reservations import ComputeReservation
from tpufleet_gke.provisioner.model import label_keys, pod_owners, pods, pool_shapes, scheduling
from tpufleet_gke.provisioner.model.pod_owners import PodOwner, PoolParent
from tpufleet_gke.provisioner.model.pods import Json
from tpufleet_gke.provisioner.model.pool_shapes import PoolShape
from tpufleet_gke.provisioner.model.scheduling import Node, Taint
from tpufleet_gke.provisioner.settings import NodeNetwork, ProvisionerSettings, parse_networks

HASH_PREFIX = "v2-"  # the former provisioner's hashes have no prefix, and cover fewer fields
PREFIX_LENGTH, KEY_LENGTH = 34, 5
# More of the key, for when another Job's key starts with the same five characters.
LONG_NAME_PREFIX_LENGTH, LONG_NAME_KEY_LENGTH = 19, 20
MAX_POOLS_PER_JOB = 20  # when other Jobs occupy all but the last
COPIED_SELECTORS = (label_keys.ICI_RESILIENCY, label_keys.LOCATION_HINT)
# GKE sets labels in these domains itself, and rejects pools that set them.
RESERVED_DOMAINS = ("cloud.google.com", "google.com", "kubernetes.io", "k8s.io", "gke.io")
# The same on all nodes of TPU pools.
_FIXED_LABELS = {
    "kubernetes.io/os": "linux",
    "kubernetes.io/arch": "amd64",
    "cloud.google.com/gke-os-distribution": "cos",
    "cloud.google.com/gke-container-runtime": "containerd",
    "iam.gke.io/gke-metadata-server-enabled": "true",
}


class PoolCapacity(StrEnum):
    SPOT = "spot"
    ON_DEMAND = "on-demand"
    RESERVED = "reserved"
    FLEX_START = "flex-start"  # GKE adds the nodes when it has capacity, perhaps hours later


@dataclass(frozen=True, slots=True)
class PoolLocation:
    """A zone and the kind of capacity to use there."""

    zone: str
    capacity: PoolCapacity

    def __str__(self) -> str:
        return f"{self.zone} ({self.capacity})"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolNeeds:
    """What the pod itself requires of a pool besides its shape, whatever the settings are."""

    pod_spec: Json  # for the scheduler's rules
    service_account: str = ""  # empty: any
    networks: tuple[NodeNetwork, ...] | None = None  # None: any


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """The pool that a pod waits for, without a chosen location."""

    name: str
    long_name: str  # used when another Job's pool has `name`
    extra_names: tuple[str, ...]  # used when other Jobs occupy both of those
    namespace: str
    owner_name: str  # see model.pod_owners
    parent: PoolParent
    shape: PoolShape
    locations: tuple[PoolLocation, ...]  # where the pod fits, in order of preference
    needs: PoolNeeds
    reservation: str = ""
    # Both without what depends on the location.
    node_config: dict[str, Any] = field(default_factory=dict)
    pool_config: dict[str, Any] = field(default_factory=dict)

    def create_request(self, location: PoolLocation, name: str | None = None) -> dict[str, Any]:
        """A NodePool in GKE's REST format."""
        request = self._request(location)
        labels = request["config"]["labels"] | {label_keys.HASH: self.hash}
        return request | {
            "name": name or self.name,
            "config": request["config"] | {"labels": labels},
        }

    @property
    def hash(self) -> str:
        locations = [[location.zone, location.capacity] for location in self.locations]
        return _pool_hash(self._request(self.locations[0]), locations)

    def unfit_reason(
        self,
        location: PoolLocation,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> str:
        """Why the scheduler would not place the pod on a node of the pool that this spec makes
        there, or of an existing one with this name and these labels; empty when it would."""
        pool_labels = self.node_config["labels"] if labels is None else labels
        return scheduling.misfit(
            self.needs.pod_spec, self._node(location, name or self.name, pool_labels)
        )

    def _node(self, location: PoolLocation, name: str, labels: Mapping[str, str]) -> Node:
        """With the labels that GKE and Kubernetes set on nodes of TPU pools."""
        capacity, machine = location.capacity, self.shape.machine_type
        by_gke = {
            **_FIXED_LABELS,
            label_keys.INSTANCE_TYPE: machine,
            label_keys.ZONE: location.zone,
            label_keys.REGION: location.zone.rpartition("-")[0],
            label_keys.NODE_POOL: name,
            label_keys.ACCELERATOR: self.shape.accelerator,
            label_keys.TOPOLOGY: self.shape.topology,
            label_keys.MACHINE_FAMILY: machine.partition("-")[0],
            label_keys.CHIP_COUNT: str(self.shape.chips_per_node),
            label_keys.PROVISIONING: "standard",
        }
        taints: tuple[Taint, ...] = ()
        match capacity:
            case PoolCapacity.SPOT:
                by_gke |= {label_keys.SPOT: "true", label_keys.PROVISIONING: "spot"}
                taints = (Taint(label_keys.SPOT, "true"),)
            case PoolCapacity.FLEX_START:
                by_gke |= {label_keys.FLEX_START: "true", label_keys.PROVISIONING: "flex-start"}
            case PoolCapacity.RESERVED if self.reservation:
                by_gke |= compute_reservations.parse(self.reservation).node_labels
        return Node({**labels, **by_gke}, taints)

    def _request(self, location: PoolLocation) -> dict[str, Any]:
        """Without the hash label."""
        config = dict(self.node_config)
        if location.capacity is PoolCapacity.SPOT:
            taint = {"key": label_keys.SPOT, "value": "true", "effect": "NO_SCHEDULE"}
            config |= {"spot": True, "taints": [taint]}
        elif location.capacity is PoolCapacity.RESERVED:
            config["reservationAffinity"] = {
                "consumeReservationType": "SPECIFIC_RESERVATION",
                "key": "compute.googleapis.com/reservation-name",
                "values": [self.reservation],
            }
        pool_config = self.pool_config
        if location.capacity is PoolCapacity.FLEX_START:
            config |= {
                "flexStart": True,
                "reservationAffinity": {"consumeReservationType": "NO_RESERVATION"},
            }
            pool_config = pool_config | _flex_start_config(self.shape.nodes)
        zones = [location.zone] if location.zone else []
        return {"name": self.name, "config": config, "locations": zones, **pool_config}


def _pool_hash(request: Mapping[str, Any], locations: object) -> str:
    """Of everything in the request except the chosen location, to recognise a changed request."""
    fixed = {key: value for key, value in request.items() if key not in ("name", "locations")}
    # The capacity kind is part of the location, and the spot taint follows from it.
    location_fields = ("spot", "flexStart", "taints")
    config = {key: value for key, value in request["config"].items() if key not in location_fields}
    text = json.dumps([fixed | {"config": config}, locations], sort_keys=True, default=str)
    return HASH_PREFIX + hashlib.sha256(text.encode()).hexdigest()[:16]


def pool_spec_for_pod(
    pod: Json, owner: PodOwner, owner_uid: str, settings: ProvisionerSettings
) -> PoolSpec:
    """BadInput when no pool could ever serve this pod, so that a retry would not help."""
    rejections: list[BadInput] = []
    for term in scheduling.affinity_terms(pod["spec"]):
        try:
            return _pool_spec_for_term(pod, term, owner, owner_uid, settings)
        except BadInput as error:
            rejections.append(error)
    raise rejections[0]


def _pool_spec_for_term(
    pod: Json, term: Json, owner: PodOwner, owner_uid: str, settings: ProvisionerSettings
) -> PoolSpec:
    """With the labels that this term of its node affinity asks for."""
    key, parent = pod_owners.job_key_of_pod(pod, owner), pod_owners.parent_of_pod(pod, owner)
    selectors = scheduling.wanted_labels(pod["spec"], term)
    for required in (label_keys.TOPOLOGY, label_keys.ACCELERATOR):
        if required not in selectors:
            raise BadInput(f"the pod has no node selector {required}")
    shape = pool_shapes.find_shape(
        selectors[label_keys.ACCELERATOR],
        selectors[label_keys.TOPOLOGY],
        pods.requested_chips(pod, settings.pod_resource),
    )
    prefix = owner.pool_name_prefix
    extra_keys = [
        hashlib.sha1(f"{key}/{number}".encode()).hexdigest()
        for number in range(3, MAX_POOLS_PER_JOB + 1)
    ]
    spec = PoolSpec(
        name=pool_name(prefix, key, PREFIX_LENGTH, KEY_LENGTH),
        long_name=pool_name(prefix, key, LONG_NAME_PREFIX_LENGTH, LONG_NAME_KEY_LENGTH),
        extra_names=tuple(
            pool_name(prefix, extra_key, LONG_NAME_PREFIX_LENGTH, LONG_NAME_KEY_LENGTH)
            for extra_key in extra_keys
        ),
        namespace=pod["metadata"]["namespace"],
        owner_name=owner.name,
        parent=parent,
        shape=shape,
        locations=_candidate_locations(pod, selectors, settings),
        needs=_needs(pod),
        reservation=_reservation(selectors),
        node_config=_node_config(
            pod, _owner_labels(pod, owner, parent, owner_uid), shape, selectors, settings
        ),
        pool_config=_pool_config(pod, shape, settings),
    )
    unfit = {location: spec.unfit_reason(location) for location in spec.locations}
    fitting = tuple(location for location, reason in unfit.items() if not reason)
    if not fitting:
        reason = " or ".join(dict.fromkeys(unfit.values()))
        hint = _hint(spec, selectors, settings)
        raise BadInput(f"the pod requires {reason}, which no node of a new pool has{hint}")
    return replace(spec, locations=fitting)


def _hint(spec: PoolSpec, selectors: Mapping[str, str], settings: ProvisionerSettings) -> str:
    if settings.force_on_demand and selected_capacities(selectors):
        return (
            " because GCP_FORCE_ON_DEMAND is set; install the admission webhook with "
            "FORCE_ON_DEMAND=true, which removes the selector"
        )
    if all(location.capacity is PoolCapacity.SPOT for location in spec.locations):
        return f"; spot nodes need the toleration {label_keys.SPOT}=true:NoSchedule"
    return ""


def pool_name(jobset: str, job_key: str, prefix_length: int, key_length: int) -> str:
    """`{jobset[:34]}-{job-key[:5]}`, in the characters that GKE accepts."""
    if len(job_key) < KEY_LENGTH:
        raise BadInput(f"the pod's label {label_keys.JOB_KEY} is too short: {job_key!r}")
    prefix = re.sub(r"[^a-z0-9-]", "-", jobset.lower())[:prefix_length].rstrip("-")
    if not prefix[:1].isalpha():
        prefix = f"p{prefix}"[:prefix_length].rstrip("-")
    return f"{prefix}-{job_key[:key_length]}"


def _candidate_locations(
    pod: Json, selectors: Mapping[str, str], settings: ProvisionerSettings
) -> tuple[PoolLocation, ...]:
    """All that the settings allow, also where the pod does not fit."""
    zones = settings.zones or scheduling.allowed_values(pod["spec"], label_keys.ZONE)
    if not zones:
        raise BadInput("no zone to create node pools in; set GCP_ZONE or GCP_ZONES")
    capacities = selected_capacities(selectors)
    if settings.force_on_demand or not capacities:
        capacities = [PoolCapacity.ON_DEMAND]
        if settings.spot_fallback and not settings.force_on_demand:
            capacities.append(PoolCapacity.SPOT)
    elif len(capacities) > 1:
        kinds = " and ".join(capacities)
        raise BadInput(f"the pod selects {kinds} capacity; select only one")
    return tuple(PoolLocation(zone, capacity) for capacity in capacities for zone in zones)


def selected_capacities(selectors: Mapping[str, str]) -> list[PoolCapacity]:
    selected = {
        PoolCapacity.RESERVED: bool(selectors.get(label_keys.RESERVATION)),
        PoolCapacity.FLEX_START: selectors.get(label_keys.FLEX_START) == "true",
        PoolCapacity.SPOT: selectors.get(label_keys.SPOT) == "true",
    }
    return [capacity for capacity, is_selected in selected.items() if is_selected]


def _needs(pod: Json) -> PoolNeeds:
    annotations = pod["metadata"].get("annotations") or {}
    networks = annotations.get(label_keys.ADDITIONAL_NETWORKS)
    return PoolNeeds(
        pod_spec=pod["spec"],
        service_account=annotations.get(label_keys.NODE_SERVICE_ACCOUNT, ""),
        networks=None
        if networks is None
        else parse_networks(networks, label_keys.ADDITIONAL_NETWORKS),
    )


def _reservation(selectors: Mapping[str, str]) -> str:
    """As the node pool names it; empty when the pod selects none."""
    name, block, sub_block = (
        selectors.get(key, "")
        for key in (
            label_keys.RESERVATION,
            label_keys.RESERVATION_BLOCK,
            label_keys.RESERVATION_SUB_BLOCK,
        )
    )
    if (block and not name) or (sub_block and not block):
        selected, missing = (
            (label_keys.RESERVATION_BLOCK, label_keys.RESERVATION)
            if block
            else (label_keys.RESERVATION_SUB_BLOCK, label_keys.RESERVATION_BLOCK)
        )
        raise BadInput(f"the pod selects {selected} without {missing}; add that node selector")
    project = selectors.get(label_keys.RESERVATION_PROJECT, "")
    return str(
        ComputeReservation(
            name=name, project=project if name else "", block=block, sub_block=sub_block
        )
    )


def _owner_labels(pod: Json, owner: PodOwner, parent: PoolParent, uid: str) -> dict[str, str]:
    """Identify the pool as managed, and its owner."""
    namespace = pod["metadata"]["namespace"]
    labels = {
        label_keys.MANAGER: label_keys.MANAGER_NAME,
        label_keys.PARENT_KIND: parent.kind.lower(),
        label_keys.PARENT_NAME: parent.name,
        label_keys.PARENT_NAMESPACE: namespace,
        label_keys.OWNER_UID: uid,
    }
    if owner.jobset_name is not None:
        labels |= {label_keys.OWNER_NAME: owner.jobset_name, label_keys.OWNER_NAMESPACE: namespace}
    return labels


def _node_config(
    pod: Json,
    owner_labels: dict[str, str],
    shape: PoolShape,
    selectors: Mapping[str, str],
    settings: ProvisionerSettings,
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "machineType": shape.machine_type,
        "labels": _labels(pod, selectors, settings) | owner_labels,
        "shieldedInstanceConfig": {
            "enableIntegrityMonitoring": True,
            "enableSecureBoot": settings.secure_boot,
        },
    }
    account = _service_account(pod, settings)
    if account:
        config["serviceAccount"] = account
    if settings.tags:
        config["tags"] = list(settings.tags)
    if settings.secondary_disk:
        disk = {"diskImage": settings.secondary_disk, "mode": "CONTAINER_IMAGE_CACHE"}
        config["secondaryBootDisks"] = [disk]
        # Images on it are read by image streaming:
        # https://cloud.google.com/kubernetes-engine/docs/how-to/data-container-image-preloading
        config["gcfsConfig"] = {"enabled": True}
    if settings.boot_disk_kms_key:
        config["bootDiskKmsKey"] = settings.boot_disk_kms_key
    if settings.disk_type:
        config["diskType"] = settings.disk_type
    if settings.confidential_storage:
        config["enableConfidentialStorage"] = True
    return config


def _labels(
    pod: Json, selectors: Mapping[str, str], settings: ProvisionerSettings
) -> dict[str, str]:
    pod_labels = pod["metadata"].get("labels") or {}
    annotations = pod["metadata"].get("annotations") or {}
    requested = [key.strip() for key in annotations.get(label_keys.COPY_LABELS, "").split(",")]
    keys = (*settings.pod_to_node_labels, *requested)
    copied = {key: pod_labels[key] for key in keys if key in pod_labels}
    # GKE refuses labels of its domains, and those of the provisioner carry the ownership.
    return {
        key: value
        for key, value in {**copied, **selectors}.items()
        if key in COPIED_SELECTORS or not is_reserved(key)
    }


def is_reserved(key: str) -> bool:
    """Whether only GKE may set this label on nodes."""
    domain, slash, _ = key.rpartition("/")
    return bool(slash) and any(
        domain == reserved or domain.endswith(f".{reserved}") for reserved in RESERVED_DOMAINS
    )


def _service_account(pod: Json, settings: ProvisionerSettings) -> str:
    account: str = (pod["metadata"].get("annotations") or {}).get(
        label_keys.NODE_SERVICE_ACCOUNT, ""
    )
    if not account or account == settings.service_account:
        return settings.service_account
    _check_allowed(
        account, label_keys.NODE_SERVICE_ACCOUNT, settings.allowed_service_accounts,
        "ALLOWED_NODE_SERVICE_ACCOUNTS",
    )  # fmt: skip
    return account


def _check_allowed(name: str, annotation: str, allowed: tuple[str, ...], setting: str) -> None:
    if "*" not in allowed and name not in allowed:
        raise BadInput(f"{annotation}: {name} is not allowed; add it to {setting}")


def _networks(pod: Json, settings: ProvisionerSettings) -> tuple[NodeNetwork, ...]:
    text = (pod["metadata"].get("annotations") or {}).get(label_keys.ADDITIONAL_NETWORKS)
    if text is None:
        return settings.additional_networks
    requested = parse_networks(text, label_keys.ADDITIONAL_NETWORKS)
    for network in requested:
        if network not in settings.additional_networks:
            _check_allowed(
                network.network, label_keys.ADDITIONAL_NETWORKS, settings.allowed_networks,
                "ALLOWED_NODE_NETWORKS",
            )  # fmt: skip
    return requested


def _pool_config(pod: Json, shape: PoolShape, settings: ProvisionerSettings) -> dict[str, Any]:
    config: dict[str, Any] = {
        "initialNodeCount": shape.nodes,
        "management": {"autoRepair": True, "autoUpgrade": False},
        "upgradeSettings": {"maxSurge": 1},
        "maxPodsConstraint": {"maxPodsPerNode": settings.max_pods_per_node},
    }
    if shape.placement is not None:
        config["placementPolicy"] = shape.placement
    networks = _networks(pod, settings)
    if networks:
        config["networkConfig"] = {
            "additionalNodeNetworkConfigs": [
                {"network": network.network, "subnetwork": network.subnetwork}
                for network in networks
            ]
        }
    return config


def _flex_start_config(nodes: int) -> dict[str, Any]:
    """Starts empty and scales to the whole slice at once. GKE replaces nodes instead of repairs.
    The limit is that of the zone: with one for all zones GKE takes the slice to have no nodes."""
    return {
        "initialNodeCount": 0,
        "autoscaling": {
            "enabled": True,
            "minNodeCount": 0,
            "maxNodeCount": nodes,
            "locationPolicy": "ANY",
        },
        "management": {"autoRepair": False, "autoUpgrade": False},
    }
