"""Names of zones and fleet members."""

from __future__ import annotations

import pytest

from tpufleet.errors import BadInput
from tpufleet.model.fleet import fleets


@pytest.mark.parametrize("zone", ["us-central1-a", "us-south1-ai1b", "us-central1-ai1a"])
def test_a_zone_and_its_members(zone):
    assert fleets.check_zone(zone) == zone
    assert fleets.parse_member(f"tpu-{zone}-7") == fleets.FleetMember(zone=zone, worker=7)


@pytest.mark.parametrize("zone", ["us-central1", "us-south1-ai1", "us-central1-A", "a", ""])
def test_not_a_zone(zone):
    with pytest.raises(BadInput, match="us-central1-a"):
        fleets.check_zone(zone)


@pytest.mark.parametrize(
    ("name", "accelerator", "spot"),
    [
        ("kmh-tpuvm-v2-32-preemptible-1", "v2-32", True),
        ("kmh-tpuvm-v6e-16-spot-4", "v6e-16", True),
        ("kmh-tpuvm-v4-8-9", "v4-8", None),
        ("tpu-us-central1-a-0", None, None),
        ("rev4-8", None, None),
    ],
)
def test_a_name_tells_type_and_capacity(name, accelerator, spot):
    assert fleets.described_by(name) == fleets.NamedProperties(accelerator, spot)
