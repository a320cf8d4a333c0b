"""Planned trouble as time goes by: storms that take nodes, zones that close and open."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from tpufleet.testbed.cloud_tpu.fault_plan import FaultPlan, PreemptionStorm
from tpufleet.testbed.cloud_tpu.nodes import NodeRecord, State

if TYPE_CHECKING:
    from tpufleet.testbed.cloud_tpu.cloud import Cloud


class ScheduledFaults:
    def __init__(self, cloud: Cloud, plan: FaultPlan) -> None:
        self._cloud = cloud
        self._plan = plan
        began_at = cloud.began_at
        for index, storm in enumerate(plan.storms):
            cloud.at(
                began_at + storm.after + storm.every,
                lambda at, index=index, storm=storm: self._blow(storm, index, 1, at),
            )
        for closing in plan.closings:
            if closing.takes:
                cloud.at(
                    began_at + closing.after,
                    lambda at, zone=closing.zone: self._take(self._spot_in(zone), at),
                )
            if closing.until is not None:
                cloud.at(began_at + closing.until, cloud.free)

    def closed(self, zone: str, now: datetime) -> bool:
        """Whether the zone has nothing to give now."""
        age = now - self._cloud.began_at
        return any(
            fnmatchcase(zone, closing.zone)
            and closing.after <= age
            and (closing.until is None or age < closing.until)
            for closing in self._plan.closings
        )

    def _blow(self, storm: PreemptionStorm, index: int, gust: int, at: datetime) -> None:
        cloud = self._cloud
        if storm.until is not None and at >= cloud.began_at + storm.until:
            return
        hit = [
            node
            for node in self._spot_in(storm.zone)
            if node.state is State.READY
            and cloud.troubles.draw(storm.share, f"storm/{index}/{gust}/{node.number}")
        ]
        if storm.notice:
            for node in hit:
                cloud.give_notice(node, "preempted", at)
        else:
            self._take(hit, at)
        cloud.at(at + storm.every, lambda later: self._blow(storm, index, gust + 1, later))

    def _spot_in(self, zone: str) -> list[NodeRecord]:
        return [
            node
            for node in self._cloud.nodes.values()
            if node.capacity == "spot" and node.holds_stock and fnmatchcase(node.zone, zone)
        ]

    def _take(self, taken: Iterable[NodeRecord], at: datetime) -> None:
        for node in taken:
            self._cloud.take(node, at)
