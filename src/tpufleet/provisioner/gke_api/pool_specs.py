"""The node pool that a waiting pod needs, as the request that GKE is sent. Pure."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.provisioner import settings
from tpufleet.provisioner.gke_api import pool_hashes, pool_shapes
from tpufleet.provisioner.gke_api.pool_shapes import PoolShape
from tpufleet.provisioner.kube import label_keys, pod_owners, pods
from tpufleet.provisioner.kube.pod_owners import PodOwner, PoolParent
from tpufleet.provisioner.kube.pods import Json
from tpufleet.provisioner.settings import NodeNetwork, ProvisionerSettings

MAX_NAME_LENGTH = 40
PREFIX_LENGTH, KEY_LENGTH = 34, 5
# Where the first five letters of two keys are the same, more of them tell two Jobs apart.
LONG_NAME_PREFIX_LENGTH, LONG_NAME_KEY_LENGTH = 19, 20
MAX_POOLS_PER_JOB = 20  # of one Job, of which others run on all but the last
COPIED_SELECTORS = (label_keys.ICI_RESILIENCY, label_keys.LOCATION_HINT)
# GKE sets labels in these domains itself, and refuses pools that bring their own.
RESERVED_DOMAINS = ("cloud.google.com", "google.com", "kubernetes.io", "k8s.io", "gke.io")


class PoolCapacity(StrEnum):
    SPOT = "spot"
    ON_DEMAND = "on-demand"
    RESERVED = "reserved"
    FLEX_START = "flex-start"  # GKE adds the nodes by itself, when it has them: in hours, perhaps


@dataclass(frozen=True, slots=True)
class PoolLocation:
    """Where a pool may be made, and of what kind of capacity."""

    zone: str
    capacity: PoolCapacity

    def __str__(self) -> str:
        return f"{self.zone} ({self.capacity})"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """A pool that a pod waits for."""

    name: str
    long_name: str  # where another Job's pool has the first one
    extra_names: tuple[str, ...]  # where others run on those two
    namespace: str
    owner_name: str  # as families know it
    owner_uid: str
    parent: PoolParent
    shape: PoolShape
    locations: tuple[PoolLocation, ...]  # best first
    reservation: str = ""
    node_config: dict[str, Any] = field(default_factory=dict)  # without what the place decides
    pool_config: dict[str, Any] = field(default_factory=dict)

    def create_request(self, location: PoolLocation, name: str | None = None) -> dict[str, Any]:
        """As GKE's REST API spells it."""
        bare = self._bare(location)
        labels = bare["config"]["labels"] | {label_keys.HASH: self.hash}
        return bare | {"name": name or self.name, "config": bare["config"] | {"labels": labels}}

    @property
    def hash(self) -> str:
        places = [[place.zone, place.capacity] for place in self.locations]
        return pool_hashes.pool_hash(self._bare(self.locations[0]), places)

    def legacy_hash(self, capacity: PoolCapacity) -> str:
        bare = self._bare(PoolLocation("", capacity))
        labels = {k: v for k, v in bare["config"]["labels"].items() if k != label_keys.OWNER_UID}
        return pool_hashes.legacy_hash(bare | {"config": bare["config"] | {"labels": labels}})

    def _bare(self, place: PoolLocation) -> dict[str, Any]:
        config = dict(self.node_config)
        if place.capacity is PoolCapacity.SPOT:
            taint = {"key": label_keys.SPOT, "value": "true", "effect": "NO_SCHEDULE"}
            config |= {"spot": True, "taints": [taint]}
        elif place.capacity is PoolCapacity.RESERVED:
            config["reservationAffinity"] = {
                "consumeReservationType": "SPECIFIC_RESERVATION",
                "key": "compute.googleapis.com/reservation-name",
                "values": [self.reservation],
            }
        rest = self.pool_config
        if place.capacity is PoolCapacity.FLEX_START:
            config |= {
                "flexStart": True,
                "reservationAffinity": {"consumeReservationType": "NO_RESERVATION"},
            }
            rest = rest | _flexible(self.shape.nodes)
        locations = [place.zone] if place.zone else []
        return {"name": self.name, "config": config, "locations": locations, **rest}


def pool_spec_for_pod(pod: Json, owner_uid: str, given: ProvisionerSettings) -> PoolSpec:
    """BadInput when no pool could ever serve this pod: trying again will not help."""
    metadata = pod["metadata"]
    family = pod_owners.owner_of_pod(pod, given.served_kinds)
    if family is None:
        raise BadInput("the pod belongs to nothing that is served; SERVE_KINDS says what is")
    key, parent = pod_owners.job_key_of_pod(pod, family), pod_owners.parent_of_pod(pod, family)
    chosen = pods.required_labels(pod)
    for needed in (label_keys.TOPOLOGY, label_keys.ACCELERATOR):
        if needed not in chosen:
            raise BadInput(f"the pod does not select a {needed}")
    shape = pool_shapes.find_shape(
        chosen[label_keys.ACCELERATOR],
        chosen[label_keys.TOPOLOGY],
        pods.requested_chips(pod, given.pod_resource),
    )
    return PoolSpec(
        name=pool_name(family.pool_name_prefix, key, PREFIX_LENGTH, KEY_LENGTH),
        long_name=pool_name(
            family.pool_name_prefix, key, LONG_NAME_PREFIX_LENGTH, LONG_NAME_KEY_LENGTH
        ),
        extra_names=tuple(
            pool_name(
                family.pool_name_prefix,
                hashlib.sha1(f"{key}/{number}".encode()).hexdigest(),
                LONG_NAME_PREFIX_LENGTH,
                LONG_NAME_KEY_LENGTH,
            )
            for number in range(3, MAX_POOLS_PER_JOB + 1)
        ),
        namespace=metadata["namespace"],
        owner_name=family.name,
        owner_uid=owner_uid,
        parent=parent,
        shape=shape,
        locations=_places(pod, chosen, given),
        reservation=_reservation(chosen),
        node_config=_config(pod, _owned_by(pod, family, parent, owner_uid), shape, chosen, given),
        pool_config=_rest(pod, shape, given),
    )


def pool_name(jobset: str, job_key: str, stem: int, key_part: int) -> str:
    """`{jobset[:34]}-{job-key[:5]}`, in the letters that GKE takes."""
    if len(job_key) < KEY_LENGTH:
        raise BadInput(f"the pod's label {label_keys.JOB_KEY} is too short: {job_key!r}")
    letters = re.sub(r"[^a-z0-9-]", "-", jobset.lower())[:stem].rstrip("-")
    if not letters[:1].isalpha():
        letters = f"p{letters}"[:stem].rstrip("-")
    return f"{letters}-{job_key[:key_part]}"


def _places(
    pod: Json, chosen: dict[str, str], given: ProvisionerSettings
) -> tuple[PoolLocation, ...]:
    insisted = pods.required_zones(pod)
    zones = given.zones if insisted is None else tuple(
        zone for zone in insisted if not given.zones or zone in given.zones
    )  # fmt: skip
    if not zones and insisted is None:
        raise BadInput("nobody said where pools are made; set GCP_ZONE or GCP_ZONES")
    if not zones:
        allowed = ", ".join(given.zones)
        raise BadInput(f"the pod insists on {', '.join(insisted)}; allowed zones: {allowed}")
    if given.force_on_demand:
        kinds: tuple[PoolCapacity, ...] = (PoolCapacity.ON_DEMAND,)
    elif chosen.get(label_keys.RESERVATION):
        kinds = (PoolCapacity.RESERVED,)
    elif chosen.get(label_keys.FLEX_START) == "true":
        kinds = (PoolCapacity.FLEX_START,)
    elif chosen.get(label_keys.SPOT) == "true":
        kinds = (PoolCapacity.SPOT,)
    else:
        kinds = (PoolCapacity.ON_DEMAND,)
        if given.spot_fallback and _tolerates_spot(pod):
            kinds = (PoolCapacity.ON_DEMAND, PoolCapacity.SPOT)
    return tuple(PoolLocation(zone, kind) for kind in kinds for zone in zones)


def _tolerates_spot(pod: Json) -> bool:
    return any(
        toleration.get("key") == label_keys.SPOT
        and toleration.get("effect") in (None, "", "NoSchedule")
        for toleration in pod["spec"].get("tolerations") or ()
    )


def _reservation(chosen: dict[str, str]) -> str:
    reservation, project = (
        chosen.get(label_keys.RESERVATION, ""),
        chosen.get(label_keys.RESERVATION_PROJECT),
    )
    return f"projects/{project}/reservations/{reservation}" if project else reservation


def _owned_by(pod: Json, family: PodOwner, parent: PoolParent, uid: str) -> dict[str, str]:
    """By these a pool is known again, and its owner found."""
    namespace = pod["metadata"]["namespace"]
    found = {
        label_keys.MANAGER: label_keys.MANAGER_NAME,
        label_keys.PARENT_KIND: parent.kind.lower(),
        label_keys.PARENT_NAME: parent.name,
        label_keys.PARENT_NAMESPACE: namespace,
        label_keys.OWNER_UID: uid,
    }
    if family.jobset_name is not None:
        found |= {label_keys.OWNER_NAME: family.jobset_name, label_keys.OWNER_NAMESPACE: namespace}
    return found


def _config(
    pod: Json,
    owned: dict[str, str],
    shape: PoolShape,
    chosen: dict[str, str],
    given: ProvisionerSettings,
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "machineType": shape.machine_type,
        "labels": _labels(pod, chosen, given) | owned,
        "shieldedInstanceConfig": {
            "enableIntegrityMonitoring": True,
            "enableSecureBoot": given.secure_boot,
        },
    }
    account = _service_account(pod, given)
    if account:
        config["serviceAccount"] = account
    if given.tags:
        config["tags"] = list(given.tags)
    if given.secondary_disk:
        disk = {"diskImage": given.secondary_disk, "mode": "CONTAINER_IMAGE_CACHE"}
        config["secondaryBootDisks"] = [disk]
    if given.boot_disk_kms_key:
        config["bootDiskKmsKey"] = given.boot_disk_kms_key
    if given.disk_type:
        config["diskType"] = given.disk_type
    if given.confidential_storage:
        config["enableConfidentialStorage"] = True
    return config


def _labels(pod: Json, chosen: dict[str, str], given: ProvisionerSettings) -> dict[str, str]:
    own = pod["metadata"].get("labels") or {}
    annotations = pod["metadata"].get("annotations") or {}
    asked = (key.strip() for key in annotations.get(label_keys.COPY_LABELS, "").split(","))
    copied = {key: own[key] for key in (*given.pod_to_node_labels, *asked) if key in own}
    selected = {
        key: value for key, value in chosen.items() if key in COPIED_SELECTORS or not _reserved(key)
    }
    return {**copied, **selected}


def _reserved(key: str) -> bool:
    domain, slash, _ = key.rpartition("/")
    return bool(slash) and any(
        domain == reserved or domain.endswith(f".{reserved}") for reserved in RESERVED_DOMAINS
    )


def _service_account(pod: Json, given: ProvisionerSettings) -> str:
    asked = (pod["metadata"].get("annotations") or {}).get(label_keys.NODE_SERVICE_ACCOUNT, "")
    if not asked or asked == given.service_account:
        return given.service_account
    allowed = given.allowed_service_accounts
    if "*" not in allowed and asked not in allowed:
        raise BadInput(
            f"nodes may not run as {asked}; ALLOWED_NODE_SERVICE_ACCOUNTS names those that "
            f"{label_keys.NODE_SERVICE_ACCOUNT} may choose"
        )
    return asked


def _networks(pod: Json, given: ProvisionerSettings) -> tuple[NodeNetwork, ...]:
    text = (pod["metadata"].get("annotations") or {}).get(label_keys.ADDITIONAL_NETWORKS)
    if text is None:
        return given.additional_networks
    asked = settings.parse_networks(text, label_keys.ADDITIONAL_NETWORKS)
    for one in asked:
        known = one in given.additional_networks or "*" in given.allowed_networks
        if not known and one.network not in given.allowed_networks:
            raise BadInput(
                f"nodes may not join the network {one.network}; ALLOWED_NODE_NETWORKS names "
                f"those that {label_keys.ADDITIONAL_NETWORKS} may choose"
            )
    return asked


def _rest(pod: Json, shape: PoolShape, given: ProvisionerSettings) -> dict[str, Any]:
    rest: dict[str, Any] = {
        "initialNodeCount": shape.nodes,
        "management": {"autoRepair": True, "autoUpgrade": False},
        "upgradeSettings": {"maxSurge": 1},
        "maxPodsConstraint": {"maxPodsPerNode": given.max_pods_per_node},
    }
    if shape.placement is not None:
        rest["placementPolicy"] = shape.placement
    networks = _networks(pod, given)
    if networks:
        rest["networkConfig"] = {
            "additionalNodeNetworkConfigs": [
                {"network": one.network, "subnetwork": one.subnetwork} for one in networks
            ]
        }
    return rest


def _flexible(nodes: int) -> dict[str, Any]:
    """A pool that begins empty, grows to the whole slice at once, and whose nodes, once gone, are
    not repaired but asked for again."""
    return {
        "initialNodeCount": 0,
        "autoscaling": {
            "enabled": True,
            "totalMinNodeCount": 0,
            "totalMaxNodeCount": nodes,
            "locationPolicy": "ANY",
        },
        "management": {"autoRepair": False, "autoUpgrade": False},
    }
