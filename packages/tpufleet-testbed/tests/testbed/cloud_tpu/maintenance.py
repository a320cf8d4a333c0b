"""Maintenance that the emulated cloud announces ahead."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from tpufleet_testbed.cloud_tpu.cloud import Cloud
from tpufleet_testbed.cloud_tpu.nodes import MaintenanceWindow, NodeRecord


def plan_maintenance(
    cloud: Cloud, record: NodeRecord, ahead: timedelta, *, scheduled: bool = True
) -> None:
    """The hosts get a notice when its window opens."""
    start = cloud.clock.now() + ahead
    record.maintenance = window = MaintenanceWindow(start=start, scheduled=scheduled)

    def begin(at: datetime) -> None:
        if record.maintenance is window and cloud.nodes.get(record.name) is record:
            record.maintenance = replace(window, ongoing=True)
            cloud.send_notice(record, "maintenance", at)

    cloud.schedule(start, begin)
