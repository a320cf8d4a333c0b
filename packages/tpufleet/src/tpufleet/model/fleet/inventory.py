"""The inventory: slices and room in pools, with what people wrote about them.

State, owner and job are observed. People edit only alias, note and belongs-to.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import msgspec

from tpufleet.model.job.jobs import Capacity, JobId


class InventoryState(StrEnum):
    """The terms of the spreadsheet that this table replaces."""

    RUNNING = "running"  # a job holds it
    RESERVED = "reserved"  # by a reservation
    RESERVED_ERROR = "reserved(error)"  # held for the owner of a job that failed
    FREE = "free"
    CREATING = "creating"
    DRAINING = "draining"  # its loss was announced
    RELEASING = "releasing"
    AVAILABLE = "not created"  # room in a pool


class InventoryNote(msgspec.Struct, frozen=True, kw_only=True):
    """What people wrote about a slice or a pool."""

    id: str
    alias: str = ""
    note: str = ""
    belongs_to: str = ""


class InventoryChange(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that are missing stay as they are; empty text removes one."""

    alias: str | None = None
    note: str | None = None
    belongs_to: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InventoryRow:
    id: str  # of a slice; of room in a pool, the pool
    alias: str
    accelerator: str
    count: int  # slices
    chips: int  # of all of them
    provider: str
    zone: str
    capacity: Capacity | None
    pool: str | None
    state: InventoryState
    owner: str | None
    job_id: JobId | None
    job_name: str
    note: str
    belongs_to: str
    since: datetime | None  # in this state, as far as known
    last_check: datetime | None  # latest heartbeat of any of its hosts
    reason: str
    node: str = ""  # adopted: the name of the node that a person made


class ChipCount(msgspec.Struct, frozen=True, kw_only=True):
    accelerator: str
    zone: str
    chips: int  # of slices that are there or being created


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    rows: tuple[InventoryRow, ...]
    chips: tuple[ChipCount, ...]
