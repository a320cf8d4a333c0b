"""Every store: edits of jobs, searches, metrics."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from msgspec import structs

from tests import postgres
from tests.contract import store_builders as a
from tests.contract.fake_store import FakeStore
from tpufleet.model.job.job_edits import JobEdit
from tpufleet.model.job.job_search import parse_search
from tpufleet.model.job.jobs import JobState
from tpufleet.model.job.metric_points import MetricPoint
from tpufleet.stores.base import ChangeSet, JobQuery
from tpufleet.stores.open_store import open_store


@pytest.fixture(params=["fake", "sqlite", "postgres"])
def store(request, tmp_path):
    if request.param == "fake":
        return FakeStore()
    urls = {
        "sqlite": lambda: f"sqlite:///{tmp_path}/fleet.db",
        "postgres": postgres.fresh_url,
    }
    store = open_store(urls[request.param]())
    request.addfinalizer(store.close)
    return store


def search(store, query, **more):
    parsed = parse_search(query, caller="ada", now=a.later(3600))
    return [job.id for job in store.jobs(JobQuery(search=parsed, **more))]


def test_an_edit_changes_live_and_ended_jobs_and_how_they_are_found(store):
    store.commit(ChangeSet(new_jobs=[a.job("j1", tags=("old",)), a.job("j2", at=1)]))
    store.commit(ChangeSet(jobs=[a.job("j2", at=1, state=JobState.CANCELLED)]))
    for job_id in ("j1", "j2"):
        edit = JobEdit(job_id=job_id, name="best", tags=("new", "b"), notes="Paper", priority=3)
        store.commit(ChangeSet(edits=[edit]))
        spec = store.job(job_id).spec
        assert (spec.name, spec.tags, spec.notes, spec.priority) == (
            "best",
            ("new", "b"),
            "Paper",
            3,
        )
    assert [job.id for job in store.jobs(JobQuery(name="best", tag="new"))] == ["j2", "j1"]
    assert store.jobs(JobQuery(tag="old")) == [] == store.jobs(JobQuery(name="train"))
    assert [job.id for job in store.jobs_like("be")] == ["j2", "j1"]
    assert search(store, "paper") == ["j2", "j1"] and search(store, "tag:old") == []
    store.commit(ChangeSet(edits=[JobEdit(job_id="unknown", name="x")]))


def test_a_controller_with_an_older_copy_does_not_undo_an_edit(store):
    old = a.job("j1", tags=("old",))
    store.commit(ChangeSet(new_jobs=[old]))
    store.commit(ChangeSet(edits=[JobEdit(job_id="j1", tags=("new",))]))
    store.commit(ChangeSet(edits=[JobEdit(job_id="j1", name="other", held_by="ada")]))
    store.commit(ChangeSet(jobs=[replace(old, state=JobState.WAITING, reason="later")]))
    job = store.job("j1")
    assert (job.state, job.reason, job.held_by) == (JobState.WAITING, "later", "ada")
    assert (job.spec.name, job.spec.tags) == ("other", ("new",))
    assert store.live().jobs == [job]
    assert search(store, "tag:new name:other") == ["j1"] and search(store, "tag:old") == []
    store.commit(ChangeSet(edits=[JobEdit(job_id="j1", held_by="")]))
    assert store.job("j1").held_by is None


def test_searches(store):
    nasty = structs.replace(
        a.job("j3", at=2).spec, notes="100%_sure \\ Ünïcode 'quoted'", pool="lab"
    )
    store.commit(
        ChangeSet(
            new_jobs=[
                a.job("j1", tags=("sweep-1",), called="resnet"),
                a.job("j2", at=1, tags=("Sweep-2", "b"), owner="bob", state=JobState.QUEUED),
                replace(a.job("j3", at=2), spec=nasty),
            ],
            attempts=[a.ended_attempt("j1", last_step=90, metrics={"loss": 0.2})],
        )
    )
    store.record_metrics(
        [MetricPoint(job_id="j2", at=a.later(1), step=5, values={"accuracy": 1.0})]
    )
    for query, found in {
        "": ["j3", "j2", "j1"],
        "owner:me": ["j3", "j1"],
        "-owner:me": ["j2"],
        "owner:b*": ["j2"],
        "tag:sweep-*": ["j2", "j1"],
        "tag:sweep-1,b": ["j2", "j1"],
        "-tag:sweep-*": ["j3"],
        "name:res*": ["j1"],
        "pool:lab": ["j3"],
        "-pool:lab": ["j2", "j1"],
        "100%_sure": ["j3"],
        "100x": [],
        "ünïcode": ["j3"],
        "'\\'": ["j3"],
        "train.py": ["j3", "j2", "j1"],
        "loss<0.3": ["j1"],
        "loss!=0.2": [],
        "step>=5": ["j2", "j1"],
        "-step>=5": ["j3"],
        "since:2026-01-01T00:00:01": ["j3", "j2"],
        "until:2026-01-01T00:00:01": ["j1"],
        "type:v5e": ["j3", "j2", "j1"],
        "type:v4-8": [],
        "id:j1 state:live": ["j1"],
        "state:ended": [],
    }.items():
        assert search(store, query) == found, query
    assert search(store, "train.py", limit=1, before="j3") == ["j2"]
    store.archive(["j1"])
    assert search(store, "train.py") == ["j3", "j2"]


def test_names_of_metrics_that_no_index_holds_keep_nothing_from_being_written(store):
    """Programs choose them. The series of the job has them, a search does not."""
    values = {a.random_text(20_000): 1.0, "a\0b": 1.0, "loss": 0.5}
    store.commit(ChangeSet(new_jobs=[a.job("j1"), a.job("j2", at=1)]))
    point = MetricPoint(job_id="j1", at=a.NOW, step=1, values=values)
    store.record_metrics([point])
    store.commit(ChangeSet(attempts=[a.ended_attempt("j2", metrics=values)]))
    assert store.metric_points("j1") == [point]
    assert search(store, "loss<1") == ["j2", "j1"]


def test_searches_for_owners_whose_names_differ_in_case(store):
    jobs = [a.job("j1", owner="ada"), a.job("j2", at=1, owner="Ada"), a.job("j3", at=2, owner="bo")]
    store.commit(ChangeSet(new_jobs=jobs))
    for query, found in {
        "owner:ada": ["j1"],
        "owner:Ada": ["j2"],
        "-owner:Ada": ["j3", "j1"],
        "owner:ada,bo": ["j3", "j1"],
        "owner:ADA": ["j2", "j1"],
        "owner:ada train.py": ["j1"],
    }.items():
        wanted = parse_search(query, caller="bo", now=a.NOW).with_exact_owners(["ada", "Ada", "bo"])
        assert [job.id for job in store.jobs(JobQuery(search=wanted))] == found, query


def test_metric_points_are_kept_in_order_and_can_be_thinned(store):
    store.commit(ChangeSet(new_jobs=[a.job("j1")]))
    points = [
        MetricPoint(job_id="j1", at=a.later(at), step=at, values={"loss": 1 / (at + 1)})
        for at in range(5)
    ]
    store.record_metrics(points[::-1])
    store.record_metrics([])
    assert store.metric_points("j1") == points and store.metric_points("j2") == []
    store.delete_metric_points(points[1:3])
    assert store.metric_points("j1") == [points[0], *points[3:]]


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "count", [20_000, pytest.param(100_000, marks=pytest.mark.scale)], ids=["20k", "100k"]
)
def test_a_search_over_many_jobs_takes_less_than_100_ms(kind, count, tmp_path):
    url = f"sqlite:///{tmp_path}/fleet.db" if kind == "sqlite" else postgres.fresh_url()
    store = open_store(url)
    batch = 5_000
    for start in range(0, count, batch):
        store.commit(
            ChangeSet(
                new_jobs=[
                    a.job(
                        f"job-{number:06}",
                        at=number / 100,
                        owner=f"user-{number % 20}",
                        called=f"train-{number % 1000}",
                        tags=(f"sweep-{number % 100}",),
                        state=JobState.FAILED if number % 10 == 0 else JobState.SUCCEEDED,
                    )
                    for number in range(start, start + batch)
                ],
                attempts=[
                    a.ended_attempt(f"job-{number:06}", metrics={"loss": number / count})
                    for number in range(start + 3, start + batch, 10)
                ],
            )
        )
    if kind == "postgres":  # what autovacuum does within a minute
        psycopg = pytest.importorskip("psycopg")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("ANALYZE")
    queries = {
        "owner:user-3 tag:sweep-* loss<0.3 since:7d state:succeeded,failed": 100,
        "loss<0.001": 1,
        "train.py": 100,
        "tag:sweep-42": 100,
        "name:train-99? owner:user-1*": 100,
        "no-such-word": 0,
        "train-777 state:failed": 0,
        "owner:nobody": 0,
    }
    for query, least in queries.items():
        times: list[float] = []
        # Other programs use this machine too: the best counts.
        while len(times) < 3 or (min(times) >= 0.1 and len(times) < 100):
            started = time.perf_counter()
            found = search(store, query, limit=100)
            times.append(time.perf_counter() - started)
        print(f"{kind} {query!r}: {min(times) * 1000:.0f} ms, {len(found)} jobs")
        assert len(found) >= least, query
        assert min(times) < 0.1, (query, times)
    store.close()
