"""Migration 5: fields of stored objects got their present names. `data` columns are rewritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpufleet.model.values.encoding import from_json, to_json
from tpufleet.stores.sql.database import DatabaseSession, Row

Document = dict[str, Any]
_ROWS_PER_BATCH = 5_000


def rename_json_keys(session: DatabaseSession) -> None:
    for table, key, convert in _TABLES:
        _rewrite(session, table, key, convert)
    results = session.rows("SELECT errand_id, host_id, data FROM errand_results")
    session.run_many(
        "UPDATE errand_results SET data = ? WHERE errand_id = ? AND host_id = ?",
        [(_converted(data, _host_command_result), *key) for *key, data in results],
    )


def _rewrite(
    session: DatabaseSession, table: str, key: str, convert: Callable[[Document], Document]
) -> None:
    select = f"SELECT {key}, data FROM {table} {{where}} ORDER BY {key} LIMIT {_ROWS_PER_BATCH}"
    rows: list[Row] = session.rows(select.format(where=""))
    while rows:
        converted = [(_converted(data, convert), row_key) for row_key, data in rows]
        session.run_many(f"UPDATE {table} SET data = ? WHERE {key} = ?", converted)
        rows = session.rows(select.format(where=f"WHERE {key} > ?"), rows[-1][0])


def _converted(data: str, convert: Callable[[Document], Document]) -> str:
    return to_json(convert(from_json(data, dict))).decode()


def _renamed(document: Document, **names: str) -> Document:
    """The order of keys stays."""
    return {names.get(key, key): value for key, value in document.items()}


def _job(job: Document) -> Document:
    return _renamed(job, kinship="parent_relation", ended_because="end_reason")


def _attempt(attempt: Document) -> Document:
    return _renamed(
        attempt,
        stop_because="stop_reason",
        ended_because="end_reason",
        words="message",
        first_host="failed_host",
    )


def _slice(tpu_slice: Document) -> Document:
    return _renamed(tpu_slice, order="request_group")


def _host(host: Document) -> Document:
    """Also the body of a heartbeat, which has the same `exit`."""
    if host.get("exit") is None:
        return host
    exit = _renamed(host["exit"], stopped_by_us="stopped_by_agent", line="log_line")
    return {**host, "exit": exit}


def _message(document: Document) -> Document:
    return _renamed(document, words="message")


def _inbox_message(message: Document) -> Document:
    renamed = _renamed(message, beat="heartbeat")
    if renamed.get("kind") == "beat":
        renamed["kind"] = "heartbeat"
    if renamed.get("heartbeat") is not None:
        renamed["heartbeat"] = _host(renamed["heartbeat"])
    return renamed


def _host_command(sent: Document) -> Document:
    renamed = _renamed(sent, errand="host_command")
    command = renamed["host_command"]
    kinds = {"checkup": "diagnose", "mend": "repair"}
    return {
        **renamed,
        "host_command": {**command, "kind": kinds.get(command["kind"], command["kind"])},
    }


def _host_command_result(result: Document) -> Document:
    return _renamed(result, words="message", cut="truncated")


_TABLES: tuple[tuple[str, str, Callable[[Document], Document]], ...] = (
    ("jobs", "id", _job),
    ("attempts", "id", _attempt),
    ("slices", "id", _slice),
    ("hosts", "id", _host),
    ("refusals", "id", _message),
    ("events", "seq", _message),
    ("inbox", "seq", _inbox_message),
    ("errands", "id", _host_command),
)
