"""The order of jobs in the queue."""

from __future__ import annotations

from datetime import datetime

from tpufleet.model.job.jobs import Job, JobId

QueueRank = tuple[int, int, datetime, JobId]


def queue_rank(job: Job, usage_step: int) -> QueueRank:
    """Higher priority first; then users with less usage, see `fair_share`; then first in, first
    out."""
    return (-job.spec.priority, usage_step, job.queued_at or job.submitted_at, job.id)
