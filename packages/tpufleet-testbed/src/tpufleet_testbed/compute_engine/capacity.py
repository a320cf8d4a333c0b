"""Whether VMs can be created: stock of zones, quota of the project, reservations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tpufleet_testbed.compute_engine import catalog, validation
from tpufleet_testbed.compute_engine.api_errors import (
    ErrorBody,
    RestError,
    operation_error,
    quota_error,
)
from tpufleet_testbed.compute_engine.catalog import Machine
from tpufleet_testbed.compute_engine.fault_plan import QuotaLimit, StockLimit
from tpufleet_testbed.compute_engine.records import Vm

STANDARD, PREEMPTIBLE = "standard", "preemptible"


@dataclass(frozen=True, kw_only=True, slots=True)
class Want:
    """VMs that are to be created together."""

    project: str
    zone: str
    machine: Machine
    model: str
    count: int
    properties: Mapping[str, Any]

    @property
    def chips(self) -> int:
        return self.count * self.machine.chips

    @property
    def reservation(self) -> str:
        """The name, without owner and block."""
        values = self.properties.get("reservationAffinity", {}).get("values", [])
        path = str(values[0]) if values else ""
        return path.partition("/reservationBlocks/")[0].rpartition("/")[2]

    @property
    def reserved(self) -> bool:
        """Whether it uses a reservation by name: with the standard model too."""
        affinity = self.properties.get("reservationAffinity", {})
        specific = affinity.get("consumeReservationType") == "SPECIFIC_RESERVATION"
        return specific and self.model in ("STANDARD", "RESERVATION_BOUND")

    @property
    def texts(self) -> dict[str, str]:
        return {
            "project": self.project, "zone": self.zone, "region": catalog.region_of(self.zone),
            "machine": self.machine.name, "reservation": self.reservation,
            "disk_type": ", ".join(disk_types(self.properties)),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """With an error the VMs are not created. `waits`: nor is the reason told."""

    error: ErrorBody | None = None
    waits: bool = False
    quota_kind: str = ""

    @property
    def granted(self) -> bool:
        return self.error is None and not self.waits


def disk_types(properties: Mapping[str, Any]) -> list[str]:
    kinds = (disk.get("initializeParams", {}).get("diskType", "") for disk in properties["disks"])
    return [str(kind).rpartition("/")[2] for kind in kinds if kind]


def unusable(want: Want) -> ErrorBody | None:
    """Problems that no capacity solves."""
    generation = want.machine.generation
    if generation.refused:
        return operation_error("machine-refused", **want.texts)
    if want.zone not in want.machine.zones:
        return operation_error("tpu-config", **want.texts)
    if any(kind not in generation.disk_types for kind in disk_types(want.properties)):
        return operation_error("disk-type", **want.texts)
    try:
        validation.scheduling(want.properties, "scheduling")
    except RestError as error:
        return operation_error("scheduling", problem=error.message)
    return None


def quota_verdict(want: Want, limits: Iterable[QuotaLimit], vms: Iterable[Vm]) -> Verdict:
    """Flex-start uses preemptible quota, or standard quota where there is none of the former; short
    of both it waits, as for stock."""
    if want.reserved:
        return Verdict()
    limits, vms = list(limits), list(vms)
    kinds = {
        "SPOT": (PREEMPTIBLE,), "FLEX_START": (PREEMPTIBLE, STANDARD),
    }.get(want.model, (STANDARD,))  # fmt: skip
    region, generation = catalog.region_of(want.zone), want.machine.generation
    lacking: tuple[str, int] | None = None
    for kind in kinds:
        most = quota_limit(limits, region, generation, kind)
        if most is None or _used(vms, region, generation, kind) + want.chips <= most:
            return Verdict(quota_kind=kind)
        lacking = lacking or (kind, most)
    assert lacking is not None
    if want.model == "FLEX_START":
        return Verdict(waits=True)
    kind, most = lacking
    if kind == PREEMPTIBLE:
        metric, quota_id = generation.preemptible_metric, generation.preemptible_quota
    else:
        metric, quota_id = generation.standard_metric, generation.standard_quota
    dimensions = _dimensions(quota_id, want.zone, generation)
    return Verdict(error=quota_error(metric, quota_id, most, region, dimensions))


def _dimensions(quota_id: str, zone: str, generation: catalog.Generation) -> dict[str, str]:
    if quota_id.endswith("-zone"):
        return {"zone": zone}
    family = {"tpu_family": generation.tpu_family} if "FAMILY" in quota_id else {}
    return {"region": catalog.region_of(zone), **family}


def quota_limit(
    limits: Iterable[QuotaLimit], region: str, generation: catalog.Generation, kind: str
) -> int | None:
    """The smallest that matches; None: there is none."""
    matching = [each.most for each in limits if each.covers(region, generation.tpu_family, kind)]
    return min(matching, default=None)


def quota_info(quota_id: str, limits: Iterable[QuotaLimit]) -> dict[str, Any] | None:
    """`quotaInfos/TPUS-PER-TPU-FAMILY-per-project-region` of Cloud Quotas. Without a limit in the
    plan the value is -1, which is how Cloud Quotas writes unlimited."""
    limits = list(limits)
    infos: list[dict[str, Any]] = []
    metric = ""
    for generation in catalog.GENERATIONS.values():
        kinds = {
            generation.standard_quota: (STANDARD, generation.standard_metric),
            generation.preemptible_quota: (PREEMPTIBLE, generation.preemptible_metric),
        }
        if quota_id not in kinds:
            continue
        kind, metric = kinds[quota_id]
        for zone in catalog.zones():
            dimensions = _dimensions(quota_id, zone, generation)
            most = quota_limit(limits, catalog.region_of(zone), generation, kind)
            info = {
                "dimensions": dimensions,
                "details": {"value": str(-1 if most is None else most)},
                "applicableLocations": [dimensions.get("zone") or dimensions["region"]],
            }
            if info not in infos:
                infos.append(info)
    if not infos:
        return None
    return {
        "quotaId": quota_id, "service": "compute.googleapis.com",
        "metric": f"compute.googleapis.com/{metric}", "dimensionsInfos": infos,
    }  # fmt: skip


def _used(vms: Iterable[Vm], region: str, generation: catalog.Generation, kind: str) -> int:
    return sum(
        vm.machine.chips
        for vm in vms
        if vm.has_machine
        and vm.quota_kind == kind
        and vm.machine.generation is generation
        and catalog.region_of(vm.zone) == region
    )


def in_stock(want: Want, limits: Iterable[StockLimit], vms: Iterable[Vm]) -> bool:
    """Reserved capacity is beside the stock."""
    held = [vm for vm in vms if vm.has_machine and not vm.reservation]
    for limit in limits:
        if limit.covers(want.zone, want.machine.name, want.model):
            used = sum(limit.covers(vm.zone, vm.machine.name, vm.model) for vm in held)
            if used + want.count > limit.most:
                return False
    return True


def stockout(want: Want, other_zones: Iterable[str]) -> ErrorBody:
    detailed = want.model == "SPOT"
    return operation_error(
        "stockout-with-details" if detailed else "stockout",
        **want.texts,
        stockout_reason="stockout" if detailed else "resource_availability",
        zones_available=",".join(other_zones),
    )
