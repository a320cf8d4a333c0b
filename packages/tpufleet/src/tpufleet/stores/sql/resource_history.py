"""By which reservation an event is found, and by which token an audit entry."""

from __future__ import annotations

from tpufleet.model.events import Event
from tpufleet.model.people.audit import AuditEntry
from tpufleet.stores.sql import sql_rows
from tpufleet.stores.sql.database import DatabaseSession

_ROWS_PER_BATCH = 5_000


def fill_resource_history(session: DatabaseSession) -> None:
    """Migration 25: of what is stored already."""
    last = 0
    while rows := session.rows(
        "SELECT seq, data FROM events WHERE seq > ? AND pool IS NOT NULL AND data LIKE ? "
        f"ORDER BY seq LIMIT {_ROWS_PER_BATCH}",
        last,
        '%"reservation"%',
    ):
        events = sql_rows.decode_all([(data,) for _, data in rows], Event)
        named = [(each.reservation, seq) for each, (seq, _) in zip(events, rows, strict=True)]
        session.run_many("UPDATE events SET reservation = ? WHERE seq = ?", named)
        last = rows[-1][0]
    last = 0
    while rows := session.rows(
        f"SELECT seq, data FROM audit WHERE seq > ? ORDER BY seq LIMIT {_ROWS_PER_BATCH}", last
    ):
        entries = sql_rows.decode_all([(data,) for _, data in rows], AuditEntry)
        session.run_many(
            "UPDATE audit SET token_id = ?, target = ? WHERE seq = ?",
            [
                (each.token_id, each.target, seq)
                for each, (seq, _) in zip(entries, rows, strict=True)
            ],
        )
        last = rows[-1][0]
