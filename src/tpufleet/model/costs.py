"""What was paid for and what came of it, in chip hours. Prices come later, at the reader's."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from tpufleet.model.jobs import Capacity, JobId


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRow:
    """Of one job on one kind of slice; without a job: of slices that nobody worked on."""

    job_id: JobId | None
    job_name: str
    owner: str
    pool: str | None
    accelerator: str
    capacity: Capacity
    slices: int
    chip_hours: float  # paid for
    running: float  # of these, with the command running on every host
    lost: float  # of these, work that was done again later

    @property
    def useful(self) -> float:
        return self.running - self.lost


@dataclass(frozen=True, kw_only=True, slots=True)
class CostReport:
    rows: tuple[CostRow, ...]
    now: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class StockRow:
    """How asking for one kind of slice in one place has gone."""

    provider: str
    zone: str
    accelerator: str
    capacity: Capacity
    granted: int
    refused: int
    preempted: int
    last_granted: datetime | None = None
    last_refused: datetime | None = None
    not_before: datetime | None = None  # when it will be asked again
    message: str = ""  # of the last refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class StockReport:
    rows: tuple[StockRow, ...]
    now: datetime
