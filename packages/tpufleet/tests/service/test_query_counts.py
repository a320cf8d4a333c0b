"""No page asks the database once for each job or slice, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from tests import postgres
from tests.contract import store_builders as a
from tests.service.harness import ServiceHarness
from tpufleet.client.fleet import new_job_id
from tpufleet.model.fleet.slices import SliceId, SliceState
from tpufleet.model.job.jobs import JobState
from tpufleet.model.people.users import Role
from tpufleet.service.api.routes import ROUTES
from tpufleet.service.transport import app
from tpufleet.service.transport.limits import WorkerThreads
from tpufleet.stores.base import ChangeSet, Store
from tpufleet.stores.open_store import open_database
from tpufleet.stores.sql.database import Database, DatabaseSession

T = TypeVar("T")

JOBS = 1000
# Of one request: a few for the caller, and one per 900 keys for each kind of row.
MOST_QUERIES = 20
# One does not end, one asks for jobs by name, and one is of browsers.
LEFT_OUT = {"/stream", "/compare", "/session"}
PAGES = sorted(
    route.path
    for route in ROUTES
    if route.method == "GET"
    and isinstance(route.role, Role)
    and "{" not in route.path
    and route.path not in LEFT_OUT
)
JOB_PAGES = ["/jobs/j0001", "/jobs/j0001/why", "/jobs/j0000/cost", "/jobs/j0000/events"]


# Servers also read by themselves, from time to time.
_of_a_request = ContextVar("of a request", default=False)


class ThreadsOfRequests(WorkerThreads):
    async def run(self, function: Callable[..., T], *args: Any) -> T:
        _of_a_request.set(True)
        return await super().run(function, *args)


class CountingDatabase:
    def __init__(self, database: Database) -> None:
        self._database = database
        self.statements: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def read(self, work: Callable[[DatabaseSession], T]) -> T:
        return self._database.read(lambda session: work(CountingSession(session, self.statements)))

    def snapshot(self, work: Callable[[DatabaseSession], T]) -> T:
        return self._database.snapshot(
            lambda session: work(CountingSession(session, self.statements))
        )


class CountingSession:
    def __init__(self, session: DatabaseSession, statements: list[str]) -> None:
        self._session, self._statements = session, statements

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def rows(self, statement: str, *parameters: object) -> list[Any]:
        if _of_a_request.get():
            self._statements.append(statement)
        return self._session.rows(statement, *parameters)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def service(request, tmp_path_factory) -> Iterator[tuple[ServiceHarness, CountingDatabase]]:
    folder = tmp_path_factory.mktemp("counted")
    url = postgres.fresh_url() if request.param == "postgres" else f"sqlite:///{folder}/fleet.db"
    database = CountingDatabase(open_database(url))
    store = Store(database)
    fill(store)
    service = ServiceHarness(store, folder)
    with pytest.MonkeyPatch.context() as patch:
        for group in ("USERS", "AUTHENTICATION"):
            patch.setattr(app, group, ThreadsOfRequests(group, 8))
        service.start()
        yield service, database
        service.close()
    store.close()


def fill(store: Store) -> None:
    """Half of the jobs run on a slice of a pool, and the others wait for one."""
    jobs, attempts, slices = [], [], []
    for number in range(JOBS):
        name, runs = f"j{number:04}", number % 2 == 0
        state = JobState.RUNNING if runs else JobState.QUEUED
        jobs.append(a.job(name, at=number, pool="lab", state=state, reason="a test"))
        attempts.append(replace(a.attempt(name), slices=(SliceId(f"s{number}"),)))
        if runs:
            slices.append(
                a.tpu_slice(f"s{number}", pool="lab", job_id=name, state=SliceState.READY)
            )
    store.commit(ChangeSet(new_jobs=jobs, pools=[replace(a.pool("lab"), largest=JOBS)]))
    store.commit(ChangeSet(jobs=jobs, attempts=attempts, slices=slices))


@pytest.mark.parametrize("path", [*PAGES, *JOB_PAGES])
def test_a_page_takes_few_queries_with_a_thousand_jobs(service, path):
    harness, database = service
    with harness.http(harness.tokens["ada"]) as http:
        database.statements.clear()
        answer = http.get(path, timeout=900)
    assert answer.status_code == 200, answer.text
    assert 0 < len(database.statements) <= MOST_QUERIES, database.statements[:30]


def test_a_submission_reads_nothing_but_who_it_is_from(service):
    harness, database = service
    harness.client("mel").me()  # its use is recorded
    database.statements.clear()
    harness.submit(new_job_id())
    assert len(database.statements) == 1 and "tokens" in database.statements[0]
