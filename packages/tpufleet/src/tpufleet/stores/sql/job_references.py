"""What a job refers to: its code, checkpoints of other jobs, and the checkpoint location that its
job file names. So that it is known who needs a file, or used a location, without reading all
jobs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tpufleet.model.job.jobs import Job
from tpufleet.stores.records import checkpoint_reference, code_reference, location_reference
from tpufleet.stores.sql import sql_rows
from tpufleet.stores.sql.database import DatabaseSession, Row

_INSERT = "INSERT INTO job_references (reference, job_id) VALUES (?, ?) ON CONFLICT DO NOTHING"


def named_folders(job: Job) -> set[str]:
    """Parts of its checkpoint location: the folder of another job is one of them."""
    if job.spec.checkpoint is None and job.parent is None:
        return set()  # a folder of its own
    return set(job.checkpoint.split("/")) - {job.id, ""}


def references(job: Job, known_ids: Collection[str]) -> list[str]:
    code = [code_reference(job.snapshot)] if job.snapshot else []
    named = [location_reference(job.checkpoint)] if job.spec.checkpoint is not None else []
    return (
        code
        + named
        + [checkpoint_reference(each) for each in named_folders(job) if each in known_ids]
    )


def write_references(session: DatabaseSession, jobs: Sequence[Job]) -> None:
    named = sorted({name for job in jobs for name in named_folders(job)})
    known = {job.id for job in jobs} | set(_existing(session, named))
    rows = [(each, job.id) for job in jobs for each in references(job, known)]
    if rows:
        session.run_many(_INSERT, rows)


def referring(
    session: DatabaseSession, wanted: Sequence[str], *, with_files: bool
) -> dict[str, set[str]]:
    condition = " AND jobs.files_deleted = 0" if with_files else ""
    found: dict[str, set[str]] = {each: set() for each in wanted}
    for batch in sql_rows.batches(wanted):
        rows = session.rows(
            "SELECT reference, job_id FROM job_references JOIN jobs ON jobs.id = job_id "
            f"WHERE reference IN ({sql_rows.placeholders(batch)}){condition}",
            *batch,
        )
        for reference, job_id in rows:
            found[reference].add(job_id)
    return found


def referred(session: DatabaseSession, wanted: Iterable[str]) -> set[str]:
    """Those that some job refers to: one row of each is read."""
    statement = "SELECT reference FROM job_references WHERE reference = ? LIMIT 1"
    return {reference for each in wanted for (reference,) in session.rows(statement, each)}


def _existing(session: DatabaseSession, ids: Sequence[str]) -> list[str]:
    rows: list[Row] = []
    for batch in sql_rows.batches(ids):
        marks = sql_rows.placeholders(batch)
        rows += session.rows(f"SELECT id FROM jobs WHERE id IN ({marks})", *batch)
    return [job_id for (job_id,) in rows]
