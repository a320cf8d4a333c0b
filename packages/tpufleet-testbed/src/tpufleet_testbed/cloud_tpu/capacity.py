"""Stock of the zones, and quota of the project."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated

import msgspec
from google.cloud.tpu_v2alpha1.types import cloud_tpu as alpha

from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import tpu_zones, type_lookup
from tpufleet_testbed.cloud_tpu import api_errors
from tpufleet_testbed.cloud_tpu.api_errors import Code
from tpufleet_testbed.cloud_tpu.nodes import NodeRecord
from tpufleet_testbed.servers import ApiError


class CapacityLimit(msgspec.Struct, frozen=True, kw_only=True):
    """At most `most` matching nodes (stock), or chips or cores (quota), as Google counts the quota
    of the type. Patterns may contain * and ?."""

    most: Annotated[int, msgspec.Meta(ge=0)]
    zone: str = "*"
    accelerator: str = "*"
    capacity: str = "*"

    def covers(self, holding: NodeRecord) -> bool:
        return (
            fnmatchcase(holding.zone, self.zone)
            and fnmatchcase(holding.accelerator.name, self.accelerator)
            and fnmatchcase(holding.capacity, self.capacity)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudCapacity:
    nodes: tuple[CapacityLimit, ...] = ()
    quota: tuple[CapacityLimit, ...] = ()

    def shortage(self, wanted: Iterable[NodeRecord], held: Iterable[NodeRecord]) -> ApiError | None:
        """The error if `wanted` does not fit beside `held`."""
        wanted, held = list(wanted), list(held)
        zone = wanted[0].zone
        for limit in self.nodes:
            matching = [node for node in wanted if limit.covers(node)]
            if matching and len(matching) + sum(map(limit.covers, held)) > limit.most:
                reserved = matching[0].capacity == "reserved"
                return api_errors.api_error("reservation" if reserved else "stockout", zone=zone)
        return None

    def reservations(
        self, project: str, zone: str, held: Sequence[NodeRecord]
    ) -> list[alpha.Reservation]:
        """The stock of one type that only reserved nodes get."""
        standard, found = alpha.Reservation.Standard, []
        for number, limit in enumerate(self.nodes):
            one_type = not set(limit.accelerator) & set("*?")
            if limit.capacity != "reserved" or not one_type or not fnmatchcase(zone, limit.zone):
                continue
            accelerator = type_lookup.find(limit.accelerator)
            used = sum(limit.covers(node) and node.zone == zone for node in held)
            found.append(
                alpha.Reservation(
                    name=f"{project}/locations/{zone}/reservations/reservation-{number}",
                    state=alpha.Reservation.State.ACTIVE,
                    standard=standard(
                        size=limit.most * accelerator.chips,
                        capacity_units=standard.CapacityUnits.CHIPS,
                        resource_type=limit.accelerator,
                        usage=standard.Usage(total=used * accelerator.chips),
                    ),
                )
            )
        return found

    def over_quota(
        self, wanted: Iterable[NodeRecord], held: Iterable[NodeRecord]
    ) -> ApiError | None:
        wanted, held = list(wanted), list(held)
        for limit in self.quota:
            matching = [node for node in wanted if limit.covers(node)]
            used = sum(_units(node) for node in held if limit.covers(node))
            more = sum(map(_units, matching))
            if matching and used + more > limit.most:
                return ApiError(Code.RESOURCE_EXHAUSTED, _quota_message(matching[0], limit.most))
        return None


UNLIMITED = CloudCapacity()


def _units(node: NodeRecord) -> int:
    return tpu_zones.quota_units(node.accelerator)


def _quota_message(node: NodeRecord, most: int) -> str:
    quota = tpu_zones.quota_id(node.accelerator, Capacity(node.capacity))
    return f"Quota limit '{quota}' has been exceeded. Limit: {most} in zone {node.zone}."
