"""Billed and useful chip hours."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import msgspec

from tpufleet.model.job.jobs import Capacity, JobId

# Name in the store's metadata of the costs that are settled.
SETTLED_COSTS = "settled_costs"


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRow:
    """One job on one type of slice. Without a job: all earlier jobs of the owner; without an owner
    too: slices that no job used."""

    job_id: JobId | None
    job_name: str
    owner: str
    pool: str | None
    accelerator: str
    capacity: Capacity
    slices: int
    chip_hours: float  # billed
    running: float  # part of it: the command ran on every host
    lost: float  # part of it: work that was repeated later
    unknown: float = 0.0  # part of `running`: neither finished nor reported its steps
    simulated: bool = False  # nothing is billed for it
    usd_per_chip_hour: float | None = None  # by the prices of the server; None: not known

    @property
    def useful(self) -> float:
        return self.running - self.lost - self.unknown


class CostReport(msgspec.Struct, frozen=True, kw_only=True):
    rows: tuple[CostRow, ...]
    now: datetime
    # What was billed before is summed by owner; None: there are rows of all jobs.
    jobs_since: datetime | None = None


class SettledCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What was billed before a moment, by owner, pool and type: it does not change any more."""

    until: datetime
    rows: tuple[CostRow, ...] = ()


class StockRow(msgspec.Struct, frozen=True, kw_only=True):
    """Grants and refusals of one type of slice from one source."""

    provider: str
    zone: str
    accelerator: str
    capacity: Capacity
    granted: int
    refused: int
    preempted: int
    last_granted: datetime | None = None
    last_refused: datetime | None = None
    not_before: datetime | None = None  # when it will be requested again
    message: str = ""  # from the last refusal


class StockReport(msgspec.Struct, frozen=True, kw_only=True):
    rows: tuple[StockRow, ...]
    now: datetime
