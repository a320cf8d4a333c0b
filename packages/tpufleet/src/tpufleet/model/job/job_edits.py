"""What users change about a job after it was submitted: name, tags, notes, priority, its place in
the queue. The rest of a spec never changes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime

from msgspec import structs

from tpufleet.model.job.jobs import Job, JobId
from tpufleet.model.values.records import replace


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEdit:
    """None: unchanged."""

    job_id: JobId
    name: str | None = None
    tags: tuple[str, ...] | None = None
    notes: str | None = None
    priority: int | None = None
    held_by: str | None = None  # empty: no longer held
    queued_at: datetime | None = None


def merge_edits(earlier: JobEdit, later: JobEdit) -> JobEdit:
    """Both, one after the other."""
    changes = {
        each.name: value
        for each in fields(JobEdit)
        if (value := getattr(later, each.name)) is not None
    }
    return replace(earlier, **changes)


def apply_edit(job: Job, edit: JobEdit) -> Job:
    spec = {
        name: value
        for name in ("name", "tags", "notes", "priority")
        if (value := getattr(edit, name)) is not None
    }
    return replace(
        job,
        spec=structs.replace(job.spec, **spec) if spec else job.spec,
        held_by=job.held_by if edit.held_by is None else edit.held_by or None,
        queued_at=edit.queued_at or job.queued_at,
    )
