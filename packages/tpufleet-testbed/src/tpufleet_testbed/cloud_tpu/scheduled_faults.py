"""Faults of a plan that happen at set times: preemption storms and zone outages."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from fnmatch import fnmatchcase
from functools import partial

from tpufleet_testbed.cloud_tpu.cloud import Cloud
from tpufleet_testbed.cloud_tpu.fault_plan import CloudFaultPlan, PreemptionStorm
from tpufleet_testbed.cloud_tpu.nodes import NodeRecord, State


def schedule_faults(cloud: Cloud, plan: CloudFaultPlan) -> None:
    started_at = cloud.started_at
    for index, storm in enumerate(plan.storms):
        cloud.schedule(
            started_at + storm.after + storm.every,
            partial(_run_storm, cloud, plan, storm, index, 1),
        )
    for outage in plan.closings:
        if outage.takes:
            cloud.schedule(started_at + outage.after, partial(_preempt_zone, cloud, outage.zone))
        if outage.until is not None:
            cloud.schedule(started_at + outage.until, cloud.notify_stock_freed)


def _run_storm(
    cloud: Cloud,
    plan: CloudFaultPlan,
    storm: PreemptionStorm,
    index: int,
    round_: int,
    at: datetime,
) -> None:
    if storm.until is not None and at >= cloud.started_at + storm.until:
        return
    victims = [
        node
        for node in _spot_nodes(cloud, storm.zone)
        if node.state is State.READY
        and plan.draw(storm.share, f"storm/{index}/{round_}/{node.number}")
    ]
    if storm.notice:
        for node in victims:
            cloud.send_notice(node, "preempted", at)
    else:
        _preempt(cloud, victims, at)
    cloud.schedule(at + storm.every, partial(_run_storm, cloud, plan, storm, index, round_ + 1))


def _spot_nodes(cloud: Cloud, zone: str) -> list[NodeRecord]:
    return [
        node
        for node in cloud.nodes.values()
        if node.capacity == "spot" and node.holds_stock and fnmatchcase(node.zone, zone)
    ]


def _preempt_zone(cloud: Cloud, zone: str, at: datetime) -> None:
    _preempt(cloud, _spot_nodes(cloud, zone), at)


def _preempt(cloud: Cloud, nodes: Iterable[NodeRecord], at: datetime) -> None:
    for node in nodes:
        cloud.reclaim(node, at)
