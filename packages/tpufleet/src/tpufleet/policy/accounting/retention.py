"""Which stored files are deleted: by age, and the oldest first when there are too many."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec

from tpufleet.model.job.jobs import JobId
from tpufleet.model.people.retention_rules import RetentionRule


class StoredFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files of one kind of a job that has ended."""

    job_id: JobId
    ended_at: datetime  # of the last job of its lineage
    size: int


class Deletion(msgspec.Struct, frozen=True, kw_only=True):
    files: StoredFiles
    reason: str


def choose(
    ended: Iterable[StoredFiles], in_use: int, rule: RetentionRule, now: datetime, name: str
) -> list[Deletion]:
    """`in_use` are bytes of live jobs, which count but are never deleted. `name` is the setting."""
    oldest_first = sorted(ended, key=lambda files: (files.ended_at, files.job_id))
    total = in_use + sum(files.size for files in oldest_first)
    chosen = []
    for files in oldest_first:
        if rule.age is not None and files.ended_at < now - rule.age:
            reason = f"older than {rule.age.days} days (retention.{name}.age)"
        elif rule.size is not None and total > rule.size:
            reason = f"all {name} take more than {rule.size} bytes (retention.{name}.size)"
        else:
            continue
        total -= files.size
        chosen.append(Deletion(files=files, reason=reason))
    return chosen
