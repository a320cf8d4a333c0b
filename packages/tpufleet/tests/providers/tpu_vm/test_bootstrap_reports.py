"""The provider reads how far hosts came from guest attributes, within the limits of the API."""

from __future__ import annotations

import urllib.request

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.providers.tpu_vm.emulated_tpus import order
from tpufleet.model.fleet import bootstrap
from tpufleet.model.fleet.bootstrap import BootstrapReport, BootstrapStage
from tpufleet.providers.tpu_vm import bootstrap_reports
from tpufleet_testbed.cloud_tpu import metadata_server
from tpufleet_testbed.cloud_tpu.fault_plan import CallFault, CloudFaultPlan
from tpufleet_testbed.cloud_tpu.host_backend import HostBackend


class ReportingHosts(HostBackend):
    """Hosts that only write guest attributes, through a real metadata server."""

    def __init__(self, metadata):
        self.metadata = metadata

    def boot(self, node):
        attributes = dict(node.template.metadata)
        self.metadata.put(node.id, metadata_server.instance_values(attributes))

    def guest_attributes(self, node, host, query_path):
        return self.metadata.guest_attributes(node.id, host, query_path)

    def write(self, node, report):
        request = urllib.request.Request(
            f"{self.metadata.url}/{node}/{report.host}/computeMetadata/v1/instance/"
            f"guest-attributes/{bootstrap.GUEST_NAMESPACE}/{bootstrap.GUEST_KEY}",
            data=bootstrap.to_json(report).encode(),
            headers={"Metadata-Flavor": "Google"},
            method="PUT",
        )
        urllib.request.urlopen(request).close()


@pytest.fixture
def booted(tpus):
    def make(*slices, **settings):
        world = tpus(**settings)
        world.hosts = world.emulator.cloud.hosts = ReportingHosts(world.emulator.metadata)
        for name in slices:
            world.provider.request(order(name))
        world.listed()
        world.pass_time(11)
        return world

    return make


def test_reports_of_hosts_are_part_of_the_listing_until_all_have_connected(booted):
    world = booted("a")
    assert world.listed()["a"].bootstrap == ()
    failed = BootstrapReport(
        host=1, stage=BootstrapStage.INSTALLING, failed=True, message="checksum"
    )
    world.hosts.write("a", failed)
    world.pass_time(30)
    assert world.listed()["a"].bootstrap == (failed,)
    for host in range(4):
        world.hosts.write("a", BootstrapReport(host=host, stage=BootstrapStage.CONNECTED))
    world.pass_time(30)
    assert world.listed()["a"].bootstrap == ()
    asked = len(world.calls("GetGuestAttributes"))
    world.pass_time(300)
    world.listed()
    assert len(world.calls("GetGuestAttributes")) == asked, "not asked any more"


def test_nodes_are_asked_at_most_three_times_a_minute_and_ten_at_a_time(booted):
    world = booted(*(f"n{index}" for index in range(25)))
    before = len(world.calls("GetGuestAttributes"))
    for _ in range(12):
        world.listed()
        world.pass_time(5)
    calls = len(world.calls("GetGuestAttributes")) - before
    assert 25 <= calls <= 3 * 25 + bootstrap_reports.MAX_READS


def test_a_failing_read_hides_nothing_else(booted):
    fault = CallFault(error="permission", method="GetGuestAttributes")
    world = booted("a", "b", "c", plan=CloudFaultPlan(calls=(fault,)))
    assert world.listed()["a"].bootstrap == ()
    assert world.provider.listing().unreachable_zones == frozenset()
    assert len(world.calls("GetGuestAttributes")) == 1, "not asked again for a minute"
    world.pass_time(61)
    world.listed()
    assert len(world.calls("GetGuestAttributes")) == 2
