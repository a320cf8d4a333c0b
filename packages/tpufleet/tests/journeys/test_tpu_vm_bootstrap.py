"""Hosts of TPU VMs that run and do not connect: what the server says about them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from datetime import timedelta

from tests.journeys.storm_cloud import NoticedHosts
from tests.journeys.test_inconsistent_listings import BOOT, TpuVmFleet
from tpufleet.model.fleet import bootstrap
from tpufleet.model.fleet.bootstrap import BootstrapReport, BootstrapStage
from tpufleet_testbed.cloud_tpu.fault_plan import CloudFaultPlan, Latencies
from tpufleet_testbed.cloud_tpu.nodes import NodeRecord

REFUSED = "cannot reach the server at http://127.0.0.1: Connection refused"


class ConnectingHosts(NoticedHosts):
    untrusted = False

    def guest_attributes(
        self, node: NodeRecord, host: int, query_path: str
    ) -> dict[tuple[str, str], str]:
        report = BootstrapReport(
            host=host,
            stage=BootstrapStage.CONNECTING,
            message=REFUSED,
            untrusted=self.untrusted,
        )
        key = (bootstrap.GUEST_NAMESPACE, bootstrap.GUEST_KEY)
        return {key: bootstrap.to_json(report)}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[TpuVmFleet]:
    latencies = Latencies(boot=timedelta(seconds=BOOT), deletion=timedelta(seconds=10))
    fleet = TpuVmFleet(tmp_path, CloudFaultPlan(latencies=latencies))
    fleet.tpus.hosts = fleet.tpus.emulator.cloud.hosts = ConnectingHosts()
    fleet.reachable = False
    yield fleet
    fleet.close()


def test_the_stage_of_a_host_replaces_what_was_said_while_the_node_was_created(fleet):
    job = fleet.run_job()
    fleet.run(BOOT - 5)
    assert fleet.gang(job)[0].reason == "creating the node"
    fleet.run(30)
    assert fleet.gang(job)[0].reason == f"host 0: connecting to the server: {REFUSED}"


def test_hosts_that_cannot_reach_the_server_are_given_up_after_two_minutes(fleet):
    job = fleet.run_job()
    fleet.until(lambda: "cannot reach this server" in fleet.job(job).reason, BOOT + 150)
    assert not fleet.gang(job)
    fleet.until(fleet.nothing_is_paid, 30)
    fleet.run(600)
    assert fleet.nodes_made() == 1, "nothing more is requested for a quarter of an hour"


def test_hosts_that_do_not_trust_the_certificate_are_explained_with_its_setting(fleet):
    fleet.tpus.hosts.untrusted = True
    job = fleet.run_job()
    fleet.until(lambda: "cannot reach this server" in fleet.job(job).reason, BOOT + 150)
    assert "set `ca_file` of the server" in fleet.job(job).reason
    assert "firewall" not in fleet.job(job).reason
