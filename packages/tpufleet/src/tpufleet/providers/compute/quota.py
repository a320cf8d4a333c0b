"""Reads the quota of TPU chips: a flex-start request that exceeds it waits like one without
capacity, and nothing else tells the two apart.

Quotas of Compute Engine are not those of the Cloud TPU API, and count chips:
cloud.google.com/docs/quotas/reference/rest/v1/projects.locations.services.quotaInfos
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec

from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu.type_lookup import Accelerator
from tpufleet.providers.compute.error_mapping import API
from tpufleet.providers.tpu_vm.google_rest import Answer, GoogleRest

READ_INTERVAL = timedelta(minutes=10)
# The value of the dimension `tpu_family`, and the word in ids of quotas of their own.
FAMILIES = {"v5p": ("CT5P", "V5P"), "v6e": ("CT6E", "V6E"), "tpu7x": ("tpu7x", "7X")}
SHARED_ID = "TPUS-PER-TPU-FAMILY-per-project-region"


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    chips: int | None  # None: unlimited
    quota_id: str
    dimensions: Mapping[str, str]


def ids(generation: str, capacity: Capacity) -> tuple[str, ...]:
    """Of the quotas that slices of this capacity type count against; the first that exists is it.
    Flex-start uses standard quota where there is no preemptible one."""
    word = FAMILIES[generation][1]
    standard = (f"TPU-{word}-per-project-zone", f"TPU-{word}-per-project-region", SHARED_ID)
    scarce = tuple(
        f"PREEMPTIBLE-TPU{dash}{word}-per-project-{scope}"
        for dash in ("-", "")
        for scope in ("region", "zone")
    )
    match capacity:
        case Capacity.SPOT:
            return scarce
        case Capacity.QUEUED:
            return (*scarce, *standard)
    return standard


class QuotaReader:
    """Each value is read again after ten minutes. A failure is no quota: nothing is known then."""

    def __init__(self, rest: GoogleRest, project: str) -> None:
        self._rest = rest
        self._project = project
        self._lock = threading.Lock()
        self._read: dict[tuple[str, str, Capacity], tuple[datetime, Limit | None]] = {}
        self.refusal = Answer(status=404, body={})  # why the last one could not be read

    def limit(
        self, accelerator: Accelerator, zone: str, capacity: Capacity, now: datetime
    ) -> Limit | None:
        """The largest that applies; None if it cannot be read, and for reserved capacity, which
        needs none."""
        if capacity is Capacity.RESERVED:
            return None
        key = (accelerator.generation, zone, capacity)
        with self._lock:
            known = self._read.get(key)
        if known is not None and now - known[0] < READ_INTERVAL:
            return known[1]
        limit = self._of(accelerator.generation, zone, capacity)
        with self._lock:
            self._read[key] = (now, limit)
        return limit

    def _of(self, generation: str, zone: str, capacity: Capacity) -> Limit | None:
        found: list[Limit] = []
        for quota_id in ids(generation, capacity):
            path = f"v1/projects/{self._project}/locations/global/services/{API}/quotaInfos"
            answer = self._rest.get("quotas", f"{path}/{quota_id}")
            if answer.status == 200:
                limit = _limit(answer.body, quota_id, generation, zone)
                found += [limit] if limit is not None else []
                continue
            self.refusal = answer
            if not answer.missing:
                return None
        # An unlimited one first.
        return max(found, key=lambda each: (each.chips is None, each.chips or 0), default=None)


def _limit(body: Mapping[str, Any], quota_id: str, generation: str, zone: str) -> Limit | None:
    """The entry that fits most closely; one without dimensions is for all others."""
    region, family = zone.rpartition("-")[0], FAMILIES[generation][0]
    here = {"region": region, "zone": zone, "tpu_family": family}
    fitting: list[tuple[int, Limit]] = []
    for info in body.get("dimensionsInfos", ()):
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
