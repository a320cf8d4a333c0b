"""Maintenance that the cloud announces days ahead, and manual nodes whose time is over."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from msgspec.structs import replace

from tests.providers.tpu_vm.emulated_tpus import ZONE, order
from tests.testbed.cloud_tpu.maintenance import plan_maintenance
from tests.views.emulated_cloud import Cloud
from tpufleet.model.fleet.fleets import NodeRequest
from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.job.jobs import Capacity
from tpufleet.policy.recovery import slice_observation
from tpufleet.providers.tpu_vm.api import TpuApi, connect
from tpufleet.providers.tpu_vm.manual_nodes import ManualNodes
from tpufleet_testbed.cloud_tpu.fault_plan import CallFault, CloudFaultPlan


def test_planned_maintenance_is_part_of_the_listing(tpus):
    world = tpus()
    world.provider.request(order("a"))
    world.pass_time(11)
    assert world.listed()["a"].maintenance_at is None
    with world.emulator.cloud.lock:
        plan_maintenance(world.emulator.cloud, world.node("a"), timedelta(days=7))
    world.pass_time(11 * 60)
    planned = world.listed()["a"].maintenance_at
    assert planned is not None
    assert timedelta(days=6) < planned - world.clock.now() < timedelta(days=7)


def test_the_listing_works_where_the_alpha_api_does_not(tpus):
    plan = CloudFaultPlan(calls=(CallFault(error="disabled", method="v2alpha1.*"),))
    world = tpus(plan=plan)
    world.provider.request(order("a"))
    world.pass_time(11)
    assert world.listed()["a"].maintenance_at is None
    world.pass_time(11)
    assert len(world.calls("v2alpha1.ListNodes")) == 1, "asked again after ten minutes only"


def test_an_announcement_is_news_once(tpus):
    world = tpus()
    world.provider.request(order("a"))
    world.pass_time(11)
    cloud = world.listed()["a"]
    now = world.clock.now()
    before = TpuSlice(
        id=SliceId("a"), provider="tpu-vm", accelerator="v5litepod-16", zone=ZONE,
        capacity=Capacity.SPOT, request_group="a", requested_at=now, state=SliceState.READY,
    )  # fmt: skip
    planned = replace(cloud, maintenance_at=now + timedelta(days=7))
    after, message = slice_observation.apply_maintenance(before, planned)
    assert "maintenance is planned for" in message and after.reason == message
    assert slice_observation.apply_maintenance(after, planned) == (after, "")
    over, message = slice_observation.apply_maintenance(after, cloud)
    assert over.maintenance_at is None and "cancelled or is over" in message


def test_a_server_deletes_manual_nodes_whose_autostop_time_is_over(tpus):
    world = tpus()
    api = TpuApi(lambda: connect(world.emulator.endpoint))
    nodes = ManualNodes(
        api, world.settings, report=lambda text: None, clock=world.clock,
        sleep=lambda seconds: world.pass_time(seconds),
    )  # fmt: skip
    short = NodeRequest(accelerator="v5litepod-4", autostop=timedelta(hours=8))
    nodes.create(ZONE, "mine", short, tries=1, delay=0)
    nodes.create(ZONE, "kept", NodeRequest(accelerator="v5litepod-4"), tries=1, delay=0)
    world.listed()
    assert world.node("mine").state.name == "READY"
    world.pass_time(8 * 3600)
    world.listed()
    assert world.node("mine") is None or world.node("mine").state.name == "DELETING"
    assert world.node("kept").state.name == "READY"


def test_the_command_line_shows_and_enforces_autostop(tmp_path):
    cloud = Cloud(tmp_path)
    try:
        name = "tpu-us-central1-a-0"
        listed = cloud.tpu.ok("vm", "apply", name, "--type", "v3-8", "--autostop", "0s")
        assert "AUTOSTOP" in listed and "UTC" in listed
        wrong = cloud.tpu(
            "vm", "apply", "tpu-us-central1-a-1", "--type", "v3-8", "--autostop", "soon"
        )
        assert wrong.exit_code == 2 and "--autostop" in wrong.stderr
        assert "would be deleted" in cloud.tpu.ok("vm", "fleet", "autostop", "--dry-run")
        assert "deleted" in cloud.tpu.ok("vm", "fleet", "autostop")
        assert cloud.states() == {}
    finally:
        cloud.emulator.close()
