"""Where Google offers which TPU type: the documented catalogue of type, zone and access."""

from __future__ import annotations

import difflib
from enum import StrEnum
from functools import cache

import msgspec

from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import type_lookup
from tpufleet.model.tpu.type_lookup import Accelerator

# Read again in November 2026: the newest edition found (docs.cloud.google.com/tpu/docs/types-zones)
# has the public zones and the AI zones, an earlier one (tpu/docs/types-zones?hl=de) those of single
# tenants. Both agree with this table; the former writes us-central1-ai1 for us-central1-ai1a.
AS_OF = "2025-11"
SOURCE = "https://cloud.google.com/tpu/docs/regions-zones"


class ZoneAccess(StrEnum):
    PUBLIC = "public"
    SINGLE_TENANT = "single-tenant"  # for customers with a contract
    AI_ZONE = "ai-zone"  # a specialised zone beside a region


_ALL: tuple[str, ...] = ()
_V2_PODS = ("v2-32", "v2-128", "v2-256", "v2-512")
# "single-tenant, except for spot quota"
_SPOT_FOR_ALL = frozenset({("v6e", "us-west1-c")})
_PUBLIC, _TENANT, _AI = ZoneAccess.PUBLIC, ZoneAccess.SINGLE_TENANT, ZoneAccess.AI_ZONE

# generation, types (empty: all of the generation), access, zones
_OFFERS: tuple[tuple[str, tuple[str, ...], ZoneAccess, tuple[str, ...]], ...] = (
    ("tpu7x", _ALL, _PUBLIC, ("us-central1-c",)),
    ("v6e", _ALL, _PUBLIC, (
        "us-central1-b", "us-east1-d", "us-east5-a", "us-east5-b", "europe-west4-a",
        "asia-northeast1-b", "southamerica-west1-a",
    )),
    ("v6e", _ALL, _AI, ("us-central1-ai1a", "us-south1-ai1b")),
    ("v6e", _ALL, _TENANT, ("us-east4-a", "us-east4-b", "us-east5-c", "us-west1-c")),
    ("v5p", _ALL, _PUBLIC, ("us-central1-a", "us-east5-a", "europe-west4-b")),
    ("v5p", _ALL, _TENANT, ("us-east5-b", "us-east5-c", "us-south1-a")),
    ("v5e", _ALL, _PUBLIC, (
        "us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a", "europe-west4-b",
    )),
    ("v5e", _ALL, _TENANT, ("us-east5-a", "us-east5-b", "us-east5-c")),
    ("v4", _ALL, _PUBLIC, ("us-central2-b",)),
    ("v3", ("v3-8",), _PUBLIC, ("us-central1-a", "us-central1-b")),
    ("v3", _ALL, _PUBLIC, ("europe-west4-a",)),
    ("v2", ("v2-8",), _PUBLIC, ("us-central1-b", "us-central1-c", "asia-east1-c")),
    ("v2", _V2_PODS, _PUBLIC, ("us-central1-a",)),
    ("v2", _ALL, _PUBLIC, ("europe-west4-a",)),
)  # fmt: skip


class ZoneOffer(msgspec.Struct, frozen=True, kw_only=True):
    """One TPU type in one zone."""

    accelerator: str
    zone: str
    access: ZoneAccess
    capacity: tuple[Capacity, ...]  # what may be requested; not what is in stock


@cache
def offers() -> tuple[ZoneOffer, ...]:
    """Every documented pair of type and zone."""
    return tuple(
        ZoneOffer(
            accelerator=kind.name, zone=zone, access=access, capacity=_capacity(kind, zone, access)
        )
        for generation, types, access, zones in _OFFERS
        for kind in type_lookup.all_types().values()
        if kind.generation == generation and (not types or kind.name in types)
        for zone in zones
    )


@cache
def zones() -> tuple[str, ...]:
    """Every zone of the catalogue, in the order of the documentation."""
    return tuple(dict.fromkeys(zone for *_, found in _OFFERS for zone in found))


@cache
def misspelt(zone: str) -> str:
    """The zone that is meant; empty for zones of known regions, and where none is near."""
    regions = {each.rpartition("-")[0] for each in zones()}
    if zone.rpartition("-")[0] in regions:
        return ""
    return next(iter(difflib.get_close_matches(zone, zones(), n=1, cutoff=0.85)), "")


def zones_of(accelerator: str) -> tuple[str, ...]:
    """Zones that offer this type, public ones first."""
    found = [offer for offer in offers() if offer.accelerator == accelerator]
    found.sort(key=lambda offer: offer.access is not ZoneAccess.PUBLIC)
    return tuple(dict.fromkeys(offer.zone for offer in found))


def is_offered(accelerator: str, zone: str) -> bool:
    """A zone that the catalogue does not know may be newer than it, so everything is possible."""
    return zone not in zones() or zone in zones_of(accelerator)


def _capacity(kind: Accelerator, zone: str, access: ZoneAccess) -> tuple[Capacity, ...]:
    if access is ZoneAccess.SINGLE_TENANT:
        spot = (kind.generation, zone) in _SPOT_FOR_ALL
        return (Capacity.SPOT, Capacity.RESERVED) if spot else (Capacity.RESERVED,)
    return (Capacity.SPOT, Capacity.ON_DEMAND, Capacity.RESERVED, Capacity.QUEUED)


# Name of the quota in the Cloud TPU API, before and after the word for spot capacity.
# cloud.google.com/tpu/docs/quota (read in November 2026): v5litepod-1, -4 and -8 require the quota
# for serving; v2 and v3 have separate quotas for single devices and for pods. The ids are those in
# error messages of the API, "Quota 'TPUV5sPreemptibleLitepodServingPerProjectPerZoneForTPUAPI'
# exhausted. Limit 4 in zone us-central1-a"; that of v3 pods is by analogy with TPUV2sPod.
_QUOTAS = {
    "v2": ("TPUV2s", ""),
    "v3": ("TPUV3s", ""),
    "v4": ("TPUV4s", "Pod"),
    "v5e": ("TPUV5s", "Litepod"),
    "v5p": ("TPUV5P", ""),
    "v6e": ("TPUV6E", ""),
}
# These generations count TensorCores; the others chips.
QUOTA_IN_CORES = frozenset({"v2", "v3", "v4", "v5p"})


def quota_id(accelerator: Accelerator, capacity: Capacity, per: str = "Zone") -> str:
    """`TPUV6EPreemptiblePerProjectPerZoneForTPUAPI`. A slice counts against the quota of its zone
    and, where there is one, of its region: `per` is Zone or Region."""
    before, after = _QUOTAS[accelerator.generation]
    single_host = accelerator.hosts == 1
    if accelerator.generation == "v5e" and single_host:
        after += "Serving"
    elif accelerator.generation in ("v2", "v3") and not single_host:
        after = "Pod"
    kind = "Preemptible" if capacity is Capacity.SPOT else ""
    return f"{before}{kind}{after}PerProjectPer{per}ForTPUAPI"


def quota_units(accelerator: Accelerator) -> int:
    """How much of its quota one slice uses."""
    return accelerator.chips * (2 if accelerator.generation in QUOTA_IN_CORES else 1)
