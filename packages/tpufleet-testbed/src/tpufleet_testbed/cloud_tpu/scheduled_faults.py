"""Faults of a plan that happen at set times: preemption storms and zone outages."""

from __future__ import annotations

from datetime import datetime
from fnmatch import fnmatchcase

from tpufleet_testbed import faults
from tpufleet_testbed.cloud_tpu.cloud import Cloud
from tpufleet_testbed.cloud_tpu.fault_plan import CloudFaultPlan
from tpufleet_testbed.cloud_tpu.nodes import NodeRecord, State
from tpufleet_testbed.faults import PreemptionStorm


def schedule_faults(cloud: Cloud, plan: CloudFaultPlan) -> None:
    def spot_nodes(zone: str) -> dict[object, NodeRecord]:
        return {
            node.number: node
            for node in cloud.nodes.values()
            if node.capacity == "spot" and node.holds_stock and fnmatchcase(node.zone, zone)
        }

    def preempt(node: NodeRecord, at: datetime, storm: PreemptionStorm | None) -> None:
        if storm is not None and storm.notice:
            cloud.send_notice(node, "preempted", at)
        elif storm is None or node.state is State.READY:
            cloud.reclaim(node, at)

    faults.schedule_storms(plan, cloud.started_at, cloud.schedule, spot_nodes, preempt)
    for outage in plan.closings:
        if outage.until is not None:
            cloud.schedule(cloud.started_at + outage.until, cloud.notify_stock_freed)
