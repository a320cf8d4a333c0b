"""Reading and writing the tables of a database, one statement at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from tpufleet.stores import migrating, rows
from tpufleet.stores.databases import Database, Row, Session

T = TypeVar("T")


class SqlTables:
    def __init__(self, database: Database) -> None:
        self._database = database
        migrating.migrate(database)

    def close(self) -> None:
        self._database.close()

    def _rows(self, statement: str, *parameters: object) -> list[Row]:
        return self._database.read(lambda session: session.rows(statement, *parameters))

    def _rows_in_parts(self, statement: str, keys: Sequence[str]) -> list[Row]:
        """For a statement with `IN ({keys})`, however many keys there are."""

        def work(session: Session) -> list[Row]:
            return [
                row
                for part in rows.batches(keys)
                for row in session.rows(statement.format(keys=rows.placeholders(part)), *part)
            ]

        return self._database.read(work)

    def _one(self, kind: type[T], statement: str, *parameters: object) -> T | None:
        return rows.decode_first(self._rows(statement, *parameters), kind)

    def _all(self, kind: type[T], statement: str, *parameters: object) -> list[T]:
        return rows.decode_all(self._rows(statement, *parameters), kind)

    def _write(self, statement: str, *parameters: object) -> None:
        self._database.write(lambda session: session.run(statement, *parameters))

    def _write_each(self, statement: str, values: Sequence[tuple[object, ...]]) -> None:
        if values:
            self._database.write(lambda session: session.run_many(statement, values))
