"""Zones of the emulated cloud, and how long its operations take."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from tpufleet.model.tpu import tpu_zones
from tpufleet_testbed.latencies import Latency, LatencyTable, seconds

ZONES = tpu_zones.zones()


# Google's guides speak of minutes for a creation and a deletion; users of Spot VMs report 2 to 5
# minutes from a request to ACTIVE.
_BOOT, _DELETION = seconds(75, 240), seconds(30, 180)
_STOP, _UPDATE = seconds(30, 90), seconds(5, 30)
_STOCKOUT, _QUEUEING = seconds(1, 20), seconds(5, 60)


@dataclass(frozen=True, kw_only=True, slots=True)
class Latencies(LatencyTable):
    """How long operations of the cloud take."""

    boot: Latency = _BOOT
    deletion: Latency = _DELETION
    stop: Latency = _STOP
    update: Latency = _UPDATE
    stockout: Latency = _STOCKOUT  # until an operation fails for lack of stock
    queueing: Latency = _QUEUEING  # until a queued resource is first considered
    notice_period: Latency = timedelta(seconds=30)  # from a notice to the preemption


# Every operation is complete at the next call.
IMMEDIATE = Latencies(
    boot=timedelta(0),
    deletion=timedelta(0),
    stop=timedelta(0),
    update=timedelta(0),
    stockout=timedelta(0),
    queueing=timedelta(0),
)
