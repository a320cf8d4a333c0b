"""A page of jobs is read from an index in its order, however long the history is: no query of a
listing sorts or reads all ended jobs."""

from __future__ import annotations

import contextlib

import pytest

from tests.contract import store_builders as a
from tpufleet.model.job.job_search import parse_search
from tpufleet.model.job.jobs import ENDED_STATES, JobState
from tpufleet.stores.base import ChangeSet, FileKind, JobQuery
from tpufleet.stores.open_store import open_database, open_store
from tpufleet.stores.sql import sql_queries

LIVE = frozenset(JobState) - ENDED_STATES
FAILED, CANCELLED = JobState.FAILED, JobState.CANCELLED


def search(text: str) -> JobQuery:
    return JobQuery(search=parse_search(text, caller="ada", now=a.NOW))


QUERIES = {
    "default": JobQuery(),
    "archived": JobQuery(archived=True),
    "all": JobQuery(archived=None),
    "of a user": JobQuery(owner="ada"),
    "live": JobQuery(states=LIVE),
    "live of a user": JobQuery(owner="ada", states=LIVE),
    "ended": JobQuery(states=ENDED_STATES),
    "failed": JobQuery(states=frozenset({FAILED})),
    "pool": JobQuery(pool="lab"),
    "name": JobQuery(name="train"),
    "children": JobQuery(parent="j1", archived=None),
    "old with files": JobQuery(states=ENDED_STATES, archived=None, having=FileKind.FILES),
    "failed with files": JobQuery(states=frozenset({FAILED}), archived=None, having=FileKind.FILES),
    "oldest with logs": JobQuery(
        states=ENDED_STATES, archived=None, having=FileKind.LOGS, oldest_first=True
    ),
    "oldest with checkpoints": JobQuery(
        states=ENDED_STATES, archived=None, having=FileKind.CHECKPOINTS, oldest_first=True
    ),
    "search by user": search("owner:ada"),
    "search by state": search("state:failed"),
    "search of live": search("state:live"),
    "search of ended": search("state:ended"),
    "search by name": search("name:train"),
    "search by type": search("type:v4-64 owner:ada"),
    "search by user and state": search("owner:ada state:failed"),
    "search by user, state and type": search("owner:ada state:succeeded type:v4-64"),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('plans')}/fleet.db"
    open_store(url).close()
    return url


@pytest.mark.parametrize("page", ["first", "later"])
@pytest.mark.parametrize("name", QUERIES)
def test_a_listing_is_read_in_the_order_of_an_index(url, name, page):
    last = None if page == "first" else a.job()
    statement, values = sql_queries.select_jobs(QUERIES[name], last)
    with contextlib.closing(open_database(url)) as database:
        plan = database.read(
            lambda session: session.rows(f"EXPLAIN QUERY PLAN {statement}", *values)
        )
    steps = [step for *_, step in plan]
    assert not [step for step in steps if "TEMP B-TREE" in step], steps
    assert "INDEX" in steps[0] or "PRIMARY KEY" in steps[0] or steps[0] == "SCAN found", steps


@pytest.mark.parametrize(
    ("query", "index"),
    [
        ("old with files", "jobs_with_files"),
        ("oldest with logs", "jobs_with_logs"),
        ("oldest with checkpoints", "jobs_with_checkpoints"),
        ("search by type", "job_search_by_owner_and_type"),
        ("search by user and state", "job_search_by_owner_and_state"),
        ("search by user, state and type", "job_search_by_owner_and_"),
    ],
)
def test_jobs_that_do_not_match_are_not_read(url, query, index):
    statement, values = sql_queries.select_jobs(QUERIES[query], None)
    with contextlib.closing(open_database(url)) as database:
        plan = database.read(
            lambda session: session.rows(f"EXPLAIN QUERY PLAN {statement}", *values)
        )
    assert [step for *_, step in plan if index in step], plan


def test_several_states_give_the_newest_of_all_of_them(tmp_path):
    with contextlib.closing(open_store(f"sqlite:///{tmp_path}/fleet.db")) as store:
        states = [FAILED, JobState.SUCCEEDED, CANCELLED, JobState.QUEUED]
        store.commit(
            ChangeSet(new_jobs=[a.job(f"j{n:02}", at=n, state=states[n % 4]) for n in range(20)])
        )
        wanted = frozenset({FAILED, CANCELLED, JobState.QUEUED})
        first = store.jobs(JobQuery(states=wanted, limit=4))
        assert [job.id for job in first] == ["j19", "j18", "j16", "j15"]
        second = store.jobs(JobQuery(states=wanted, limit=4, before=first[-1].id))
        assert [job.id for job in second] == ["j14", "j12", "j11", "j10"]
