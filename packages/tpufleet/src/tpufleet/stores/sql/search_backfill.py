"""Migration 13: search rows and last metrics of the jobs that were stored before migration 12."""

from __future__ import annotations

from tpufleet.model.job.attempts import Attempt
from tpufleet.model.job.jobs import Job
from tpufleet.stores.sql import sql_rows
from tpufleet.stores.sql.database import DatabaseSession, Row
from tpufleet.stores.sql.sql_people import LATEST_METRIC, SEARCH, metric_rows, search_row

_ROWS_PER_BATCH = 5_000


def fill_job_search(session: DatabaseSession) -> None:
    last = ""
    while rows := _after(session, "jobs", last):
        jobs = sql_rows.decode_all([(data,) for _, data in rows], Job)
        session.run_many(SEARCH, [search_row(job) for job in jobs])
        last = rows[-1][0]
    last = ""
    while rows := _after(session, "attempts", last):
        attempts = sql_rows.decode_all([(data,) for _, data in rows], Attempt)
        ordered = sorted(attempts, key=lambda each: (each.job_id, each.number))
        session.run_many(LATEST_METRIC, [row for each in ordered for row in metric_rows(each)])
        last = rows[-1][0]


def _after(session: DatabaseSession, table: str, last: str) -> list[Row]:
    return session.rows(
        f"SELECT id, data FROM {table} WHERE id > ? ORDER BY id LIMIT {_ROWS_PER_BATCH}", last
    )
