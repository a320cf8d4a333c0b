"""Builders of pending jobs, pools and supplies for placement tests."""

from __future__ import annotations

from tests.policy.builders import MINUTE, NOON, after, make_job
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.job.jobs import Capacity
from tpufleet.policy.scheduling import placement, source_choice
from tpufleet.policy.scheduling.placement import FreeSlice, Occupant, PendingJob, Supply
from tpufleet.policy.scheduling.source_choice import CapacitySource, RefusalHistory

ZONES = ("z1", "z2")
SOURCES = tuple(CapacitySource("fake", zone, Capacity.SPOT) for zone in ZONES)
TYPE = "v5litepod-16"


def make_pool(name="lab", largest=4, **options) -> Pool:
    return Pool(name=name, provider="fake", accelerator=TYPE, largest=largest, **options)


def make_pending(name: str, missing=1, *, pool="lab", order=0, held=0, **options) -> PendingJob:
    """A job that lacks slices; `order` tells when it was submitted."""
    job = make_job(name, pool=pool, slices=missing + held, submitted_at=after(order), **options)
    held_source = SOURCES[0] if held else None
    return PendingJob(job=job, missing=missing, sources=SOURCES, held_source=held_source)


def free(*names: str, zone="z1", accelerator=TYPE) -> list[FreeSlice]:
    return [FreeSlice(name, zone, accelerator) for name in names]


def occupant(name: str, slices=1, *, priority=0, since=NOON, minutes=None, stopping=False):
    return Occupant(
        job_id=name,
        priority=priority,
        since=since,
        slices=slices,
        ends_by=NOON + minutes * MINUTE if minutes else None,
        stopping=stopping,
    )


def make_supply(pool: Pool, available=(), occupants=(), **options) -> Supply:
    live = len(available) + sum(item.slices for item in occupants)
    return Supply(
        pools={pool.name: pool},
        free={pool.name: list(available)},
        live={pool.name: live},
        occupants={pool.name: list(occupants)},
        pool_sources={pool.name: SOURCES},
        **options,
    )


def decide(pending, supply=None, refusals=None):
    return placement.place(pending, supply or Supply(), refusals or RefusalHistory(), NOON)


def kinds(decisions) -> list[tuple[str, str]]:
    return [(item.job_id, type(item).__name__) for item in decisions]


def refusal(source=SOURCES[0], **options):
    return source_choice.new_refusal(source, TYPE, "no stock", previous=None, now=NOON, **options)
