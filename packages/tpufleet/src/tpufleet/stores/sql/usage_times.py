"""When slices were there and attempts ran, as columns beside the objects."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from tpufleet.stores.sql import sql_rows
from tpufleet.stores.sql.database import DatabaseSession

_ROWS_PER_BATCH = 5_000


@dataclass(frozen=True, slots=True)
class _StoredSlice:
    requested_at: datetime
    lost_at: datetime | None = None
    gone_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class _StoredAttempt:
    created_at: datetime
    ended_at: datetime | None = None


def fill_usage_times(session: DatabaseSession) -> None:
    """Migration 27: of what is stored already."""
    last = ""
    while rows := session.rows(
        "SELECT id, data FROM slices WHERE gone = 1 AND id > ? "
        f"ORDER BY id LIMIT {_ROWS_PER_BATCH}",
        last,
    ):
        slices = sql_rows.decode_all([(data,) for _, data in rows], _StoredSlice)
        ends = [each.gone_at or each.lost_at or each.requested_at for each in slices]
        session.run_many(
            "UPDATE slices SET gone_at = ? WHERE id = ?",
            [(sql_rows.to_micros(at), key) for at, (key, _) in zip(ends, rows, strict=True)],
        )
        last = rows[-1][0]
    last = ""
    while rows := session.rows(
        f"SELECT id, data FROM attempts WHERE id > ? ORDER BY id LIMIT {_ROWS_PER_BATCH}", last
    ):
        attempts = sql_rows.decode_all([(data,) for _, data in rows], _StoredAttempt)
        session.run_many(
            "UPDATE attempts SET created_at = ?, ended_at = ? WHERE id = ?",
            [
                (sql_rows.to_micros(each.created_at), sql_rows.end_micros(each.ended_at), key)
                for each, (key, _) in zip(attempts, rows, strict=True)
            ],
        )
        last = rows[-1][0]
