"""Reads the quota of TPU chips: a flex-start request that exceeds it waits like one without
capacity, and nothing else tells the two apart.

Quotas of Compute Engine are not those of the Cloud TPU API, and count chips:
cloud.google.com/docs/quotas/reference/rest/v1/projects.locations.services.quotaInfos
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import tpu_zones, type_lookup
from tpufleet.model.tpu.type_lookup import Accelerator
from tpufleet.providers.compute.error_mapping import API
from tpufleet.providers.tpu_vm.google_rest import Answer, GoogleRest

READ_INTERVAL = timedelta(minutes=10)
# The value of the dimension `tpu_family`, and the word in ids of quotas of their own.
FAMILIES = {"v5p": ("CT5P", "V5P"), "v6e": ("CT6E", "V6E"), "tpu7x": ("tpu7x", "7X")}
_USAGE = (
    "items(machineType,status,scheduling/provisioningModel,"
    "reservationAffinity/consumeReservationType),nextPageToken"
)
_WITH_MACHINE = ("PROVISIONING", "STAGING", "RUNNING", "REPAIRING", "PENDING_STOP", "STOPPING")
SHARED_ID = "TPUS-PER-TPU-FAMILY-per-project-region"


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    chips: int | None  # None: unlimited
    quota_id: str
    dimensions: Mapping[str, str]


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """What applies to slices of a type: of each kind of quota the largest limit."""

    limits: tuple[Limit, ...]
    in_use: int = 0  # chips, at least

    @property
    def most(self) -> Limit:
        """Unlimited before any number."""
        return max(self.limits, key=lambda each: (each.chips is None, each.chips or 0))

    def allows(self, chips: int, slices: int = 1) -> bool:
        """Whether slices of so many chips fit. A slice does not divide between two kinds."""
        most = self.most.chips
        total = sum(each.chips or 0 for each in self.limits)
        return most is None or (chips <= most and chips * slices + self.in_use <= total)

    def __str__(self) -> str:
        used = f", {self.in_use} of them in use" if self.in_use else ""
        return f"{' + '.join(str(each.chips) for each in self.limits)} chips{used}"


def ids(generation: str, capacity: Capacity) -> tuple[tuple[str, ...], ...]:
    """Of the quotas that slices of this capacity type count against, by kind. Flex-start uses
    standard quota where there is no preemptible one."""
    word = FAMILIES[generation][1]
    standard = (f"TPU-{word}-per-project-zone", f"TPU-{word}-per-project-region", SHARED_ID)
    scarce = tuple(
        f"PREEMPTIBLE-TPU{dash}{word}-per-project-{scope}"
        for dash in ("-", "")
        for scope in ("region", "zone")
    )
    match capacity:
        case Capacity.SPOT:
            return (scarce,)
        case Capacity.QUEUED:
            return (scarce, standard)
    return (standard,)


def exceeded(quota: Quota, accelerator: Accelerator, slices: int, zone: str) -> str:
    return (
        f"quota {quota.most.quota_id} allows {quota} in {zone.rpartition('-')[0]}; "
        f"{accelerator.chips * slices} are needed, and the request would only wait"
    )


class QuotaReader:
    """Each value is read again after ten minutes. A failure is no quota: nothing is known then."""

    def __init__(self, rest: GoogleRest, project: str) -> None:
        self._rest = rest
        self._project = project
        self._lock = threading.Lock()
        self._read: dict[tuple[str, str, Capacity], tuple[datetime, Quota | None]] = {}
        self.refusal = Answer(status=404, body={})  # why the last one could not be read

    def get(
        self,
        accelerator: Accelerator,
        zone: str,
        capacity: Capacity,
        now: datetime,
        *,
        in_use: bool = True,
    ) -> Quota | None:
        """None if it cannot be read, and for reserved capacity, which needs none."""
        if capacity is Capacity.RESERVED:
            return None
        key = (accelerator.generation, zone, capacity)
        with self._lock:
            known = self._read.get(key)
        if known is None or now - known[0] >= READ_INTERVAL:
            known = (now, self._of(accelerator.generation, zone, capacity))
            with self._lock:
                self._read[key] = known
        quota = known[1]
        if quota is None or quota.most.chips is None or not in_use:
            return quota
        zones = {zone}
        if all("region" in each.dimensions for each in quota.limits):
            region = zone.rpartition("-")[0]
            offered = tpu_zones.zones_of(accelerator.name)
            zones |= {each for each in offered if each.rpartition("-")[0] == region}
        return replace(quota, in_use=self._in_use(accelerator, zones, capacity))

    def _of(self, generation: str, zone: str, capacity: Capacity) -> Quota | None:
        limits: list[Limit] = []
        for kind in ids(generation, capacity):
            found: list[Limit] = []
            for quota_id in kind:
                path = f"v1/projects/{self._project}/locations/global/services/{API}/quotaInfos"
                answer = self._rest.get("quotas", f"{path}/{quota_id}")
                if answer.status == 200:
                    limit = _limit(answer.body, quota_id, generation, zone)
                    found += [limit] if limit is not None else []
                    continue
                self.refusal = answer
                if not answer.missing:
                    return None
            limits += [Quota(limits=tuple(found)).most] if found else []
        return Quota(limits=tuple(limits)) if limits else None

    def _in_use(self, accelerator: Accelerator, zones: Collection[str], capacity: Capacity) -> int:
        """Chips of VMs that surely count against it, whoever created them. Of flex-start VMs only
        Google knows against which kind."""
        machines = {
            each.machine_type: each.chips_per_host
            for each in type_lookup.all_types().values()
            if each.generation == accelerator.generation and each.machine_type
        }
        models: tuple[str, ...] = ("SPOT", "FLEX_START", "STANDARD")
        if capacity is not Capacity.QUEUED:
            models = ("SPOT",) if capacity is Capacity.SPOT else ("STANDARD",)
        family, chips = str(accelerator.machine_type).partition("-")[0], 0
        for each in zones:
            query = {
                "filter": f"machineType eq .*/{family}-.*",
                "fields": _USAGE,
                "maxResults": "500",
            }
            path = f"compute/v1/projects/{self._project}/zones/{each}/instances"
            for answer in self._rest.pages("compute", path, **query):
                chips += sum(
                    machines.get(vm["machineType"].rpartition("/")[2], 0)
                    for vm in answer.body.get("items", ())
                    if vm.get("status") in _WITH_MACHINE
                    and (vm.get("scheduling") or {}).get("provisioningModel", "STANDARD") in models
                    and (vm.get("reservationAffinity") or {}).get("consumeReservationType")
                    != "SPECIFIC_RESERVATION"
                )
        return chips


def _limit(body: Mapping[str, Any], quota_id: str, generation: str, zone: str) -> Limit | None:
    """The entry that fits most closely; one without dimensions is for all others, of the locations
    that it names."""
    region, family = zone.rpartition("-")[0], FAMILIES[generation][0]
    here = {"region": region, "zone": zone, "tpu_family": family}
    fitting: list[tuple[int, Limit]] = []
    for info in body.get("dimensionsInfos", ()):
        if {region, zone, "global"}.isdisjoint(info.get("applicableLocations") or (zone,)):
            continue
        dimensions = {str(key): str(value) for key, value in info.get("dimensions", {}).items()}
        if any(here.get(key, "").lower() != value.lower() for key, value in dimensions.items()):
            continue
        value = int((info.get("details") or {}).get("value", 0))
        scope = "zone" if quota_id.endswith("zone") else "region"
        asked = {scope: here[scope]}
        if quota_id == SHARED_ID:
            asked["tpu_family"] = family
        limit = Limit(chips=None if value < 0 else value, quota_id=quota_id, dimensions=asked)
        fitting.append((len(dimensions), limit))
    return max(fitting, key=lambda each: each[0])[1] if fitting else None
