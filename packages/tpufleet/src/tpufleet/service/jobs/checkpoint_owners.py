"""Whose a checkpoint location is that job files name. Members use their own locations only, so that
nobody blocks or overwrites the checkpoints of others.

It belongs to the user whose job ran there first, as long as there is that user. A location that no
job has used belongs to the user after whom one of its folders is named, else to whoever submits a
job there first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpufleet.errors import Forbidden
from tpufleet.model.job.checkpoint_locations import spelled
from tpufleet.model.job.jobs import Job, JobId
from tpufleet.service.hosts.assignments import job_location
from tpufleet.service.jobs.lineages import batches
from tpufleet.service.transport.auth import Caller
from tpufleet.stores.base import JobQuery, Store, location_reference


def require_owned(store: Store, caller: Caller, jobs: Sequence[Job]) -> None:
    """Forbidden when a job names a location of another user. An admin may use any."""
    locations = {
        location_reference(location): location
        for job in jobs
        for location in (job.checkpoint, job_location(job.checkpoint))
    }
    if not locations:
        return
    users = {user.name for user in store.users()}
    first_jobs = _first_jobs(store, list(locations.values()))
    for reference, location in locations.items():
        first = first_jobs.get(reference)
        if first is not None:
            owner, why = first.owner, f"job {first.id} of {first.owner} used it first"
        else:
            owner = _named_after(location, caller.name, users)
            why = f"it is in a folder of {owner}"
        if owner != caller.name and owner in users and not caller.is_admin:
            raise Forbidden(
                f"checkpoint: {location} belongs to {owner}: {why}\n"
                f"  next: use another location, or ask {owner} or an admin to submit the job"
            )


def _first_jobs(store: Store, locations: Sequence[str]) -> dict[str, Job]:
    """By reference: the first job that ran there."""
    found = store.referring_jobs([location_reference(each) for each in locations])
    ran = _ran(store, sorted({job_id for ids in found.values() for job_id in ids}))
    first_jobs = {}
    for reference, ids in found.items():
        jobs = [ran[each] for each in ids if each in ran]
        if jobs:
            first_jobs[reference] = min(jobs, key=lambda job: (job.submitted_at, job.id))
    return first_jobs


def _ran(store: Store, job_ids: Sequence[JobId]) -> dict[JobId, Job]:
    """Those that had an attempt; one that was only submitted left nothing there."""
    found: dict[JobId, Job] = {}
    for batch in batches(job_ids):
        started = store.newest_attempts(batch)
        query = JobQuery(ids=batch, archived=None, limit=len(batch))
        found |= {job.id: job for job in store.jobs(query) if job.id in started}
    return found


def _named_after(location: str, caller: str, users: Iterable[str]) -> str:
    """`ada` of gs://lab/ada/run-1; the caller if one of the folders has their name, or none has."""
    folders = spelled(location).rpartition("://")[2].split("/")
    named = [folder for folder in folders if folder in users]
    return caller if caller in named or not named else named[0]
