"""Checkpoint locations: at most one live job writes to each.

Jobs that may share a location are checked and inserted under one lease of the store, so that two
servers, or two requests, cannot both find it free.
"""

from __future__ import annotations

import os
import posixpath
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from tpufleet.errors import Conflict, Unreachable
from tpufleet.model.job.checkpoint_locations import spelled
from tpufleet.model.job.jobs import LIVE_STATES, Job
from tpufleet.service import leases
from tpufleet.service.hosts.assignments import checkpoint_location
from tpufleet.stores.base import JobQuery, Lease, Store

LEASE_NAME = "checkpoint locations"
LEASE_TTL = timedelta(seconds=60)
WAIT_SECONDS = 10.0
_NO_LIMIT = 10_000_000
_lock = threading.Lock()  # requests of one server wait here


class LocationsBusy(Unreachable):
    """Other requests are checking checkpoint locations, or a large folder is being deleted."""

    def __init__(self) -> None:
        super().__init__("checkpoint locations are busy with other requests; retry")


@contextmanager
def exclusive(store: Store, now: datetime) -> Iterator[Lease]:
    """Commit with the lease as fence. Raises LocationsBusy."""
    deadline = time.monotonic() + WAIT_SECONDS
    if not _lock.acquire(timeout=WAIT_SECONDS):
        raise LocationsBusy
    try:
        with leases.hold(store, LEASE_NAME, LEASE_TTL, now, deadline, LocationsBusy()) as lease:
            yield lease
    finally:
        _lock.release()


def require_free(store: Store, jobs: Iterable[Job]) -> None:
    """Conflict when a live job, or another one of these, uses the location of a job."""
    users = {location: job for job in _live_jobs(store) for location in _locations(job)}
    for job in jobs:
        for location in _locations(job):
            user = users.setdefault(location, job)
            if user.id != job.id:
                end = f"run `tpu cancel {user.id}`"
                if user.owner != job.owner:
                    end = f"ask {user.owner} or an admin to cancel it"
                raise Conflict(
                    f"checkpoint: {location} is in use by job {user.id} ({user.spec.name}), which "
                    f"is {user.state}; wait for it, {end}, or use another location"
                )


def _live_jobs(store: Store) -> list[Job]:
    return store.jobs(JobQuery(states=LIVE_STATES, limit=_NO_LIMIT))


def _locations(job: Job) -> set[str]:
    return {normalized(location) for location in (job.checkpoint, checkpoint_location(job))}


def normalized(location: str) -> str:
    """Equal for spellings of one location. On disk, links are resolved."""
    if location.startswith("/"):
        try:
            return os.path.realpath("/" + location.lstrip("/"))
        except (OSError, ValueError):  # a link that this user may not read; no valid path
            return spelled(location)
    return spelled(location) if "://" in location else posixpath.normpath(location)
