"""Migrations go forward only, from the schema of release 0.1.0, which does not change any more."""

from __future__ import annotations

import contextlib
import hashlib
import io
from pathlib import Path

import pytest

from tests import postgres
from tests.contract import every_table
from tests.contract import store_builders as a
from tpufleet.errors import Conflict
from tpufleet.model.job.metric_points import MetricPoint
from tpufleet.stores.base import ChangeSet
from tpufleet.stores.open_store import open_database, open_store
from tpufleet.stores.sql import dump, schema_migrations

# A line is added with each migration; once released, neither a line nor its file is changed.
RELEASED = {
    1: "206fd730ae3ca62f00eba1904ed79fe14db3f775308dde9095095a96e96f0bed",  # 0.1.0
}
# Rows in every table, written by 0.1.0 with
# `PYTHONPATH=packages/tpufleet:. python -m tests.contract.every_table`.
FIRST_RELEASE = Path(__file__).with_name("release_0_1_0.jsonl").read_text().splitlines()
MANY = 5_001  # more rows than a backup reads at once
LATER = {
    **schema_migrations.migrations(),
    9_999: "ALTER TABLE pools ADD COLUMN note $text; UPDATE pools SET note = name",
}


@pytest.fixture(params=["sqlite", "postgres"])
def new_url(request, tmp_path):
    """A function that gives the URL of an empty database, of one kind."""
    if request.param == "postgres":
        return postgres.fresh_url
    numbers = iter(range(9))
    return lambda: f"sqlite:///{tmp_path}/fleet-{next(numbers)}.db"


@pytest.mark.parametrize("number", RELEASED)
def test_released_migrations_do_not_change(number):
    digest = hashlib.sha256(schema_migrations.migrations()[number].encode()).hexdigest()
    assert digest == RELEASED[number], (
        f"migration {number} was released: databases that have it do not get this change.\n"
        "Undo the change and add a file with the next number to stores/sql/migrations/ instead; "
        "see docs/decisions/0029-release-reset.md"
    )


def test_migrations_are_numbered_without_gaps():
    numbers = list(schema_migrations.migrations())
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_table_has_rows_in_these_tests(new_url):
    url = new_url()
    with contextlib.closing(open_store(url)) as store:
        every_table.fill(store)
    with contextlib.closing(open_database(url)) as database:
        tables = every_table.rows_of(database)
    assert tables.keys() == schema_migrations.key_sizes().keys()
    assert [table for table, (_, rows) in tables.items() if not rows] == []


def test_a_database_of_the_first_release_is_readable_and_can_be_written(new_url):
    first, today = new_url(), new_url()
    with contextlib.closing(open_store(today)) as store:
        every_table.fill(store)
        expected = every_table.contents(store)
    with contextlib.closing(open_database(first)) as database:
        dump.load_dump(database, FIRST_RELEASE, 1)
    with contextlib.closing(open_store(first)) as store:
        assert every_table.contents(store) == expected
        store.commit(ChangeSet(new_jobs=[a.job("new", at=9)], events=[a.event()]))
        assert store.last_event() == 3


def test_a_migration_is_applied_once_and_older_programs_then_refuse_the_database(new_url):
    url = new_url()
    with contextlib.closing(open_store(url)) as store:
        every_table.fill(store)
    with contextlib.closing(open_database(url)) as database:
        before = every_table.rows_of(database)
        for _ in range(2):
            database.write(lambda session: schema_migrations.apply(session, database, LATER))
        after = every_table.rows_of(database)
        assert schema_migrations.version(database) == max(LATER)
    columns, rows = before.pop("pools")
    assert after.pop("pools") == ([*columns, "note"], [(*row, row[0]) for row in rows])
    assert after.pop("migrations") == (["number"], [(number,) for number in LATER])
    del before["migrations"]
    assert after == before
    with pytest.raises(Conflict, match=f"schema version {max(LATER)}"):
        open_store(url)


def test_a_backup_of_a_newer_version_is_refused(new_url):
    with (
        contextlib.closing(open_database(new_url())) as database,
        pytest.raises(Conflict, match=f"schema version {max(LATER)}"),
    ):
        dump.load_dump(database, FIRST_RELEASE, max(LATER))


def test_tables_with_several_key_columns_are_backed_up_completely(tmp_path: Path):
    source, target = (f"sqlite:///{tmp_path}/{name}.db" for name in ("source", "target"))
    with contextlib.closing(open_store(source)) as store:
        store.commit(
            ChangeSet(new_jobs=[a.job(f"j{number}", tags=("x",)) for number in range(MANY)])
        )
        points = [(f"j{number}", 0) for number in range(MANY)]
        points += [("j0", number) for number in range(1, MANY)]
        store.record_metrics(
            [MetricPoint(job_id=job, at=a.later(at), step=1, values={}) for job, at in points]
        )
    file = io.StringIO()
    with (
        contextlib.closing(open_database(source)) as database,
        contextlib.closing(open_database(target)) as empty,
    ):
        version = dump.write_dump(database, file)
        dump.load_dump(empty, file.getvalue().splitlines(), version)
        assert every_table.rows_of(empty) == every_table.rows_of(database)
