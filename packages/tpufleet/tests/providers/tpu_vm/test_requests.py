"""The API request for an order, and orders that are rejected."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from google.cloud import tpu_v2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.providers.tpu_vm.emulated_tpus import ZONE, order
from tpufleet.errors import BadInput, BadRequest
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.job.pod_settings import PodSettings
from tpufleet.model.tpu import tpu_zones, type_lookup
from tpufleet.providers.tpu_vm import naming
from tpufleet.providers.tpu_vm.provider import TpuVmProvider
from tpufleet.providers.tpu_vm.settings import DataDisk, TpuVmSettings
from tpufleet.providers.tpu_vm.settings import parse as parse_settings
from tpufleet_testbed.cloud_tpu.node_validation import LABEL_VALUE


def template(world, name):
    return world.node(name).template


def test_a_node_has_ids_as_labels_and_host_settings_as_metadata(world):
    world.provider.request(order("tpf-j-1", id="o1", job_id="job7", pool="Lab Pool"))
    sent = template(world, "tpf-j-1")
    assert dict(sent.labels) == {
        "tpufleet-fleet": "test",
        "tpufleet-order": "o1",
        "tpufleet-slice": "tpf-j-1",
        "tpufleet-job": "job7",
        "tpufleet-pool": "lab-pool",
        "tpufleet-capacity": "spot",
    }
    assert sent.metadata["tpufleet-server"] == "http://10.0.0.1:8470"
    assert json.loads(sent.metadata["tpufleet-tokens"]) == {"tpf-j-1": "token of tpf-j-1"}
    assert sent.metadata["tpufleet-hosts"] == "4" and sent.metadata["tpufleet-chips"] == "4"
    assert sent.metadata["startup-script"].startswith("#!")


@pytest.mark.parametrize(
    ("fields", "mounts", "gcsfuse"),
    [
        ({}, None, None),
        ({"mounts": ("/data", "/mnt/out")}, "/data\n/mnt/out", "yes"),
        ({"pool": "lab"}, None, "yes"),
    ],
    ids=["none", "job", "pool"],
)
def test_hosts_learn_which_buckets_will_be_mounted(world, fields, mounts, gcsfuse):
    world.provider.request(order("a", **fields))
    sent = template(world, "a").metadata
    assert (sent.get("tpufleet-mounts"), sent.get("tpufleet-gcsfuse")) == (mounts, gcsfuse)


@pytest.mark.parametrize(
    ("accelerator", "runtime"),
    [
        ("v3-8", "tpu-ubuntu2204-base"),
        ("v4-8", "tpu-ubuntu2204-base"),
        ("v5e-8", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "v2-alpha-tpuv5"),
        ("v6e-8", "v2-alpha-tpuv6e"),
    ],
)
def test_the_runtime_follows_the_generation(world, accelerator, runtime):
    zone = tpu_zones.zones_of(type_lookup.find(accelerator).name)[0]
    world.reopen(zones=(zone,)).request(order("a", accelerator=accelerator, zone=zone))
    assert world.node("a", zone).template.runtime_version == runtime


def test_operator_settings_reach_the_node(world):
    world.reopen(
        network="projects/p/global/networks/n",
        subnetwork=("s",),
        external_ips=False,
        service_account="tpu@p.iam.gserviceaccount.com",
        tags=("tpu", "nat"),
        data_disks=(DataDisk(source="projects/p/zones/us-central1-a/disks/d"),),
        metadata={"team": "vision"},
        runtimes={"v5e": "tpu-vm-base"},
    )
    world.provider.request(order("a"))
    sent = template(world, "a")
    assert sent.runtime_version == "tpu-vm-base"
    assert sent.network_config.network.endswith("/n")
    assert not sent.network_config.enable_external_ips
    assert sent.service_account.email == "tpu@p.iam.gserviceaccount.com"
    assert list(sent.tags) == ["tpu", "nat"] and sent.metadata["team"] == "vision"
    assert sent.data_disks[0].mode is tpu_v2.AttachedDisk.DiskMode.READ_ONLY


_FULL = "https://www.googleapis.com/compute/v1/projects/host"


@pytest.mark.parametrize(
    ("network", "subnetwork", "expected"),
    [
        ("n", ["s"], ("my-project", "my-project")),
        ("global/networks/n", ["regions/us-central1/subnetworks/s", "s"],
         ("my-project", "my-project")),
        ("projects/host/global/networks/n", ["s"], ("host", "host")),
        (f"{_FULL}/global/networks/n", [f"{_FULL}/regions/us-central1/subnetworks/s", "x"],
         ("host", "host")),
    ],
    ids=["names", "partial URLs", "a shared VPC", "full URLs"],
)  # fmt: skip
def test_networks_are_sent_as_the_apis_take_them(world, network, subnetwork, expected):
    parsed = parse_settings(
        {"project": "my-project", "zones": [ZONE], "network": network, "subnetwork": subnetwork}
    )
    world.reopen(network=parsed.network, subnetwork=parsed.subnetwork)
    world.provider.request(order("a"))
    sent, (host, of_subnetwork) = template(world, "a").network_config, expected
    assert sent.network == f"projects/{host}/global/networks/n"
    assert sent.subnetwork == f"projects/{of_subnetwork}/regions/us-central1/subnetworks/s"


def test_a_zone_without_a_subnetwork_is_refused_before_anything_is_paid_for():
    urls = ["regions/us-central1/subnetworks/s"]
    with pytest.raises(BadInput, match="none is in the region of us-west4-a"):
        parse_settings({"project": "my-project", "zones": [ZONE, "us-west4-a"], "subnetwork": urls})


@pytest.mark.parametrize(
    ("capacity", "spot", "reserved"),
    [
        (Capacity.SPOT, True, False),
        (Capacity.ON_DEMAND, False, False),
        (Capacity.RESERVED, False, True),
    ],
)
def test_the_capacity_type_sets_the_scheduling_config(world, capacity, spot, reserved):
    world.provider.request(order("a", capacity=capacity))
    sent = template(world, "a").scheduling_config
    assert (sent.spot, sent.reserved) == (spot, reserved)


def test_queued_capacity_is_a_best_effort_queued_resource_with_a_deadline(world):
    world.provider.request(order("a", capacity=Capacity.QUEUED))
    sent = world.queued("a").request
    assert "spot" not in sent and "guaranteed" not in sent
    assert sent.queueing_policy.valid_until_duration.total_seconds() == 24 * 3600 + 60
    assert sent.tpu.node_spec[0].node_id == "a"


def test_spot_can_be_queued_and_a_reservation_is_named(world):
    world.reopen(
        queue=(Capacity.QUEUED, Capacity.SPOT),
        reservation="projects/p/locations/z/reservations/r",
    )
    world.provider.request(order("a"))
    assert "spot" in world.queued("a").request
    world.provider.request(order("b", capacity=Capacity.RESERVED))
    sent = world.queued("b").request
    assert "guaranteed" in sent and sent.reservation_name.endswith("/r")


def test_the_short_name_of_a_reservation_is_that_of_the_zone(world):
    world.reopen(reservation="ours")
    world.provider.request(order("a", capacity=Capacity.RESERVED))
    sent = world.queued("a").request
    assert sent.reservation_name.startswith("projects/")
    assert sent.reservation_name.endswith(f"/locations/{ZONE}/reservations/ours")


def test_a_gang_is_one_queued_resource_whose_nodes_are_its_slices(world):
    world.provider.request(order("tpf-j-o-0", "tpf-j-o-1", "tpf-j-o-2"))
    spec = world.queued("tpf-j-o").request.tpu.node_spec[0]
    assert (spec.multislice_params.node_count, spec.multislice_params.node_id_prefix) == (
        3, "tpf-j-o",
    )  # fmt: skip
    world.pass_time(10)
    assert set(world.listed()) == {"tpf-j-o-0", "tpf-j-o-1", "tpf-j-o-2"}


def test_slices_of_a_gang_with_other_names_are_found_by_index(world):
    world.provider.request(order("red", "green", id="o9"))
    world.pass_time(10)
    assert set(world.listed()) == {"red", "green"}
    assert world.node("tpf-o9-1") is not None
    world.provider.release(SliceId("green"), ZONE)
    world.pass_time(2)
    assert set(world.listed()) == {"red"} and world.node("tpf-o9-1") is None
    world.provider.release(SliceId("red"), ZONE)
    world.pass_time(2)
    assert world.listed() == {} and world.queued("tpf-o9") is None


def test_nodes_of_other_fleets_are_neither_listed_nor_adopted(world):
    other = TpuVmProvider(world.settings, fleet="another-fleet", clock=world.clock, deadline=900)
    other.request(order("a", fleet="another-fleet"))
    other.close()
    assert world.listed() == {}
    with pytest.raises(BadRequest, match="belongs to another fleet"):
        world.provider.request(order("a"))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        pytest.param({"zone": "us-central1-b"}, "tpu_vm.zones", id="zone not ours"),
        pytest.param({"zone": "us-central1-a/../x"}, "is not a zone", id="zone with a path"),
        pytest.param({"accelerator": "v5e-17"}, "v5e-17", id="type"),
        pytest.param({"accelerator": "tpu7x-8"}, "gke", id="no TPU VM"),
    ],
)
def test_an_invalid_order_is_rejected_before_any_call(world, bad, message):
    with pytest.raises(BadRequest, match=message):
        world.provider.request(order("a", **bad))
    assert world.emulator.service.calls == []


@given(text=st.text(max_size=80))
@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
def test_fuzzed_names_zones_and_types_are_rejected_without_a_call(world, text):
    before = len(world.emulator.service.calls)
    for field in ("zone", "accelerator"):
        if text.strip().lower() not in (*type_lookup.spellings(), *world.settings.zones):
            with pytest.raises(BadRequest):
                world.provider.request(order("a", **{field: text}))
    if not naming.NODE_ID.fullmatch(text):
        with pytest.raises(BadRequest):
            world.provider.request(order(text))
        world.provider.release(SliceId(text), ZONE)
    assert len(world.emulator.service.calls) == before


@given(key=st.text(max_size=20), value=st.text(max_size=40))
@settings(max_examples=examples(150), deadline=None)
def test_fuzzed_settings_are_accepted_or_rejected_with_a_message(key, value):
    for field in ({"metadata": {key: value}}, {"tags": (value,)}, {"zones": (value,)},
                  {"project": value}, {"bundle": value, "bundle_sha256": key}):  # fmt: skip
        try:
            TpuVmSettings(**{"project": "my-project", "zones": (ZONE,), **field})
        except BadInput as error:
            assert str(error)


@given(text=st.text(max_size=100))
def test_any_text_becomes_a_valid_label(text):
    assert LABEL_VALUE.fullmatch(naming.label_value(text))


def test_the_runtime_version_decides_whether_slices_of_a_pool_are_replaced(world):
    def digest(accelerator: str = "v5litepod-16") -> str:
        return world.provider.slice_settings(accelerator, PodSettings(cpu="8"))

    before, other_type = digest(), digest("v4-8")
    world.reopen(tags=("lab",), valid_for=timedelta(hours=1))
    assert digest() == before, "an upgrade of the server gives up no capacity"
    world.reopen(runtimes={"v5e": "tpu-ubuntu2204-base"})
    assert (digest() != before, digest("v4-8")) == (True, other_type)
