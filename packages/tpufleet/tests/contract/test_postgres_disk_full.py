"""A full disk of the Postgres server is told apart from one that cannot be reached."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests import postgres
from tests.contract import store_builders as a
from tpufleet.errors import DatabaseFull
from tpufleet.stores.base import ChangeSet, JobQuery
from tpufleet.stores.sql.postgres import Timeouts, open_postgres

# As Postgres reports it when it cannot extend the file of a table. Constraint triggers run at the
# commit, as do checks that are deferred.
FULL = """
    CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
      RAISE EXCEPTION 'could not extend file "base/1/2": No space left on device'
        USING ERRCODE = 'disk_full';
    END $$;
"""
WHEN = {
    "at the write": "CREATE TRIGGER full_disk BEFORE INSERT ON jobs "
    "FOR EACH ROW EXECUTE FUNCTION full_disk()",
    "at the commit": "CREATE CONSTRAINT TRIGGER full_disk AFTER INSERT ON jobs "
    "INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION full_disk()",
}


@contextlib.contextmanager
def full_disk(url: str, when: str) -> Iterator[None]:
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(FULL + WHEN[when])
        yield
        connection.execute("DROP FUNCTION full_disk CASCADE")


@pytest.mark.parametrize("when", WHEN)
def test_a_full_disk_is_named_and_reading_goes_on(when):
    url = postgres.fresh_url()
    with contextlib.closing(open_postgres(url, Timeouts(disk_full=0.0))) as store:
        store.commit(ChangeSet(new_jobs=[a.job("j1")]))
        assert store.write_error() is None
        with full_disk(url, when):
            with pytest.raises(DatabaseFull, match=r"(?s)No space left.*next: free space"):
                store.commit(ChangeSet(new_jobs=[a.job("j2")], events=[a.event()]))
            assert [job.id for job in store.jobs(JobQuery())] == ["j1"]
            assert isinstance(store.write_error(), DatabaseFull), "reading proves nothing"
        store.commit(ChangeSet(new_jobs=[a.job("j2")], events=[a.event()]))
        assert (store.write_error(), store.last_event()) == (None, 1)


def test_small_writes_that_succeed_do_not_hide_a_full_disk():
    url = postgres.fresh_url()
    with contextlib.closing(open_postgres(url)) as store:
        store.commit(ChangeSet(new_jobs=[a.job("j1")]))
        with full_disk(url, "at the write"), pytest.raises(DatabaseFull):
            store.commit(ChangeSet(new_jobs=[a.job("j2")]))
        store.put_user(a.user())
        assert isinstance(store.write_error(), DatabaseFull)
