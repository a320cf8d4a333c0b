"""Billed and useful chip hours."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

import msgspec

from tpufleet.model.job.jobs import Capacity, JobId

# Name in the store's metadata of the costs that are settled.
SETTLED_COSTS = "settled_costs"


class Badput(StrEnum):
    """What billed time went into that was no useful step. The names are those of Google's library
    ml-goodput-measurement, but for the last; what a program loads or prepares by itself is not
    known apart from its steps and its start."""

    PROGRAM_STARTUP = "program_startup"  # imports, compiling, everything until the first step
    TPU_INITIALIZATION = "tpu_initialization"  # the processes connect
    CHECKPOINT_RESTORE = "unproductive_checkpoint_restore_time"
    CHECKPOINT_SAVE = "unproductive_checkpoint_save_time"
    WASTED_PROGRESS = "wasted_progress_from_disruption"  # steps that were made again
    # From a fault until the program of the next attempt starts.
    INFRASTRUCTURE_RECOVERY = "infrastructure_recovery_from_disruption"
    OTHER = "other"  # booting, setup, idle in a pool, the end of a program
    UNKNOWN = "unknown"  # it ran, but neither finished nor reported its steps


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
    useful: float  # part of it: steps that count
    badput: dict[Badput, float] = field(default_factory=dict)  # the other parts
    simulated: bool = False  # nothing is billed for it
    usd_per_chip_hour: float | None = None  # by the prices of the server; None: not known


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
