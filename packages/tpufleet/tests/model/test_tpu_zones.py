"""The catalogue of types and zones, against Google's page of regions and zones."""

from __future__ import annotations

import pytest

from tpufleet.model.fleet import fleets
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import tpu_zones, type_lookup
from tpufleet.model.tpu.tpu_zones import ZoneAccess


@pytest.mark.parametrize(
    ("accelerator", "zone", "offered"),
    [
        ("v6e-8", "us-east5-b", True),
        ("v6e-8", "us-south1-ai1b", True),
        ("v6e-8", "europe-west4-b", False),
        ("v5litepod-16", "us-west4-a", True),
        ("v5litepod-16", "us-central1-b", False),
        ("v5p-8", "us-east5-a", True),
        ("v4-8", "us-central2-b", True),
        ("v4-8", "us-central1-a", False),
        ("v3-8", "us-central1-a", True),
        ("v3-32", "us-central1-a", False),
        ("v3-32", "europe-west4-a", True),
        ("v2-8", "us-central1-a", False),
        ("v2-32", "us-central1-a", True),
        ("v6e-8", "mars-north1-a", True),  # unknown zone: not for us to refuse
    ],
)
def test_types_are_offered_in_the_documented_zones(accelerator, zone, offered):
    assert tpu_zones.is_offered(accelerator, zone) is offered


def test_every_type_has_a_zone_and_every_zone_a_valid_name():
    assert all(tpu_zones.zones_of(name) for name in type_lookup.all_types())
    assert all(fleets.check_zone(zone) for zone in tpu_zones.zones())


def test_zones_of_single_tenants_come_last_and_offer_reservations_only():
    assert tpu_zones.zones_of("v5litepod-8")[-1] == "us-east5-c"
    [offer] = [
        offer
        for offer in tpu_zones.offers()
        if (offer.accelerator, offer.zone) == ("v5litepod-8", "us-east5-c")
    ]
    assert offer.access is ZoneAccess.SINGLE_TENANT and offer.capacity == (Capacity.RESERVED,)


def test_spot_is_for_all_in_one_zone_of_single_tenants():
    capacity = {
        offer.zone: offer.capacity for offer in tpu_zones.offers() if offer.accelerator == "v6e-8"
    }
    assert capacity["us-west1-c"] == (Capacity.SPOT, Capacity.RESERVED)
    assert capacity["us-east4-a"] == (Capacity.RESERVED,)


@pytest.mark.parametrize(
    ("accelerator", "capacity", "quota"),
    [
        ("v5e-4", Capacity.SPOT, "TPUV5sPreemptibleLitepodServing"),
        ("v5e-8", Capacity.ON_DEMAND, "TPUV5sLitepodServing"),
        ("v5e-16", Capacity.ON_DEMAND, "TPUV5sLitepod"),
        ("v5e-16", Capacity.SPOT, "TPUV5sPreemptibleLitepod"),
        ("v2-8", Capacity.ON_DEMAND, "TPUV2s"),
        ("v2-32", Capacity.ON_DEMAND, "TPUV2sPod"),
        ("v5p-8", Capacity.SPOT, "TPUV5PPreemptible"),
        ("v6e-8", Capacity.SPOT, "TPUV6EPreemptible"),
    ],
)
def test_each_type_uses_the_quota_that_the_api_names(accelerator, capacity, quota):
    kind = type_lookup.find(accelerator)
    assert tpu_zones.quota_id(kind, capacity) == f"{quota}PerProjectPerZoneForTPUAPI"
